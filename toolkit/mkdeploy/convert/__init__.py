"""GGUF to package and back: one module per step; `pipeline.convert` and `merge.merge` are the two doors."""
