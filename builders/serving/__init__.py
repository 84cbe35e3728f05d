"""What runs inside Triton. `publish` copies `entry/` and `lane/` into each version, and what lies here into both.

Nothing here imports the builders: a version directory needs numpy, tokenizers and onnxruntime (or TensorRT and
cuda-python), nothing else.
"""
