"""The runner on graphs whose weights lie in a file beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from builders.errors import ExportError
from builders.graph_file import save_graph
from builders.verify.runner import OUTPUT, OnnxRunner

IDS = np.array([[5, 6, 7, 8], [9, 10, 0, 0]], np.int32)
LENGTH = np.array([[4], [2]], np.int32)


@pytest.mark.parametrize("limit", [0, 10**9], ids=["through a folder", "in memory"])
def test_answers_are_the_same_when_weights_lie_beside_the_graph(
    tiny: onnx_ir.Model, blocks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    expected = OnnxRunner(tiny, blocks, threads=1).run(IDS, LENGTH)
    # Not `load_graph`: its tensors still name the file.
    model = onnx_ir.load(save_graph(tiny, tmp_path / "model.onnx", external_above=0))
    assert (tmp_path / "model.onnx.data").exists()
    monkeypatch.setattr("builders.verify.runner.EXTERNAL_ABOVE", limit)
    runner = OnnxRunner(model, blocks, threads=1)
    for path in tmp_path.iterdir():
        path.unlink()
    got = runner.run(IDS, LENGTH)
    assert sorted(got) == sorted(expected)
    for name in got:
        np.testing.assert_array_equal(got[name], expected[name])
    assert np.isfinite(got[OUTPUT]).all()


def test_file_is_named_when_its_weights_are_gone(tiny: onnx_ir.Model, tmp_path: Path) -> None:
    model = onnx_ir.load(save_graph(tiny, tmp_path / "model.onnx", external_above=0))
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(ExportError, match=r"data cannot be read.*model\.onnx\.data"):
        OnnxRunner(model)
