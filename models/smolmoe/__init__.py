"""SmolMoE-135M: the trained delta, its evaluation and training tokens, and build.py, which makes the GGUF."""
