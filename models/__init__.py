"""The models of this repository: recipes that build them, never their weights (gguf_file.py is shared by the recipes).

| module | builds | used by |
| --- | --- | --- |
| `smolmoe.build` | SmolMoE-135M, a real small MoE (273 MB, F16) | demo, parity tests, quality figures |
| `tiny` | seeded random models of some hundred kB, one per architecture | unit and parity tests |
| `random_moe` | a seeded random qwen2moe larger than a small phone's memory (4 GB) | benchmarks |
"""
