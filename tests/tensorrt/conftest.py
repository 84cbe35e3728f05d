"""The default model's graph in FP16, and the TensorRT-RTX that builds plans without a GPU."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from builders.precision import convert
from builders.tensorrt.adapter import TensorRT, open_tensorrt


@pytest.fixture(scope="session")
def rtx() -> TensorRT:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed: pip install -e '.[dev]'")
    return open_tensorrt("rtx")


@pytest.fixture(scope="session")
def minilm_fp16(minilm_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ir.load(minilm_onnx)
    convert(model, "fp16")
    path = tmp_path_factory.mktemp("fp16") / "model.onnx"
    ir.save(model, path)
    return path
