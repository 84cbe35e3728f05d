"""What runs inside Triton. `publish` copies `entry/`, `lane/` and `ensemble/` into each version, beside their model.py,
and what lies here into each of them.

Nothing here imports the builders: a version directory needs numpy, tokenizers and onnxruntime (or TensorRT and
cuda-python), nothing else.
"""
