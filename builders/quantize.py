"""FP8 and INT8 through NVIDIA Model Optimizer, an optional package; the accuracy gate judges what comes out.

The call follows the signature in Model Optimizer's reference (modelopt.onnx.quantization.quantize); it is not run in
this project's tests.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from builders.errors import PrecisionError

Quantization = Literal["fp8", "int8"]


def quantize(
    source: Path, destination: Path, kind: Quantization, calibration: Mapping[str, Any], *, method: str = "max"
) -> Path:
    """Write a graph with QuantizeLinear and DequantizeLinear around its products.

    Args:
        source: the fused FP32 graph.
        destination: file to write; it appears when it is whole.
        kind: `fp8` needs compute capability 8.9 or newer on the GPU that runs the plan.
        calibration: input name to array, INT32 [n, L] and [n, 1]: real texts, a few hundred.
        method: Model Optimizer's calibration method; its own defaults differ between versions.

    Returns:
        `destination`.

    Raises:
        PrecisionError: Model Optimizer is not installed, no such kind, or it refuses the graph.
    """
    if kind not in get_args(Quantization):
        raise PrecisionError("no such quantisation", value=kind, limit="fp8 or int8", remedy="choose one of them")
    if importlib.util.find_spec("modelopt") is None:
        raise PrecisionError(
            f"{kind} needs NVIDIA Model Optimizer, which is not installed",
            value="modelopt",
            limit="modelopt.onnx.quantization",
            remedy="pip install 'nvidia-modelopt[onnx]', or use fp16 or bf16",
        )
    draft = destination.with_name(f".{destination.name}.new")
    try:
        # Through importlib: the package is optional and has no type information.
        quantization = importlib.import_module("modelopt.onnx.quantization")
        quantization.quantize(
            onnx_path=str(source),
            quantize_mode=kind,
            calibration_data=dict(calibration),
            calibration_method=method,
            op_types_to_quantize=["MatMul", "Gemm"],  # norms and softmax stay as they are
            high_precision_dtype="fp16",
            output_path=str(draft),
        )
        draft.replace(destination)
    except Exception as error:  # Model Optimizer, onnx and onnxruntime each raise their own kinds
        raise PrecisionError(f"Model Optimizer failed: {error}", value=kind, remedy="use fp16 or bf16") from error
    finally:
        draft.unlink(missing_ok=True)
    return destination
