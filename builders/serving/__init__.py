"""What runs inside Triton. `publish` copies `entry/` and `lane/` into each version, beside their model.py.

Nothing here imports the builders: a version directory needs numpy, tokenizers and onnxruntime, nothing else.
"""
