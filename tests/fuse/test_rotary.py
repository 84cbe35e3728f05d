"""Cosines and sines of rotary positions, in the forms that models write, become tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.fuse import Context, count_sites
from builders.fuse.positions import Positions
from builders.fuse.rotary import find_turns
from builders.fuse.step import TARGETS

_WIDTH, _POSITIONS = 6, 64
_FREQUENCIES = (1 / 100 ** (np.arange(_WIDTH // 2) / 3)).astype(np.float32)
CONTEXT = Context(TARGETS["onnxruntime"], _POSITIONS)


def graph_of(*, first: int = 0, early_cast: bool = False, shifted: bool = False) -> ir.Model:
    """ids [b, L] -> cos(position * frequency) and sin of it, [1, L, width], positions from `first` on."""
    nodes = [
        helper.make_node("Shape", ["ids"], ["length1"], start=1, end=2),
        helper.make_node("Squeeze", ["length1"], ["length"]),
        helper.make_node("Range", ["zero", "length", "one"], ["count"]),
        helper.make_node("Add", ["count", "first"], ["positions"]),
        helper.make_node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats" if early_cast else "positions", "axes"], ["column"]),
        helper.make_node("Cast", ["column"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["numbers", "frequencies"], ["half"]),
        helper.make_node("Concat", ["half", "half"], ["angle"], axis=-1),
        helper.make_node("Cast", ["ids"], ["asked"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["asked"], ["most"], keepdims=0),
        helper.make_node("Mul", ["angle", "most"], ["other"]),
        *(helper.make_node(kind, ["other" if shifted else "angle"], [kind.upper()]) for kind in ("Cos", "Sin")),
    ]
    constants: dict[str, np.ndarray[Any, Any]] = {
        "zero": np.array(0, dtype=np.int64),
        "one": np.array(1, dtype=np.int64),
        "first": np.array(first, dtype=np.int64),
        "axes": np.array([0, 2], dtype=np.int64),
        "frequencies": _FREQUENCIES,
    }
    graph = helper.make_graph(
        nodes,
        "turns",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, ["b", "L"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "L", _WIDTH]) for name in ("COS", "SIN")],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def run(model: ir.Model, length: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = session.run(
        ["COS", "SIN"], {"ids": np.ones((2, length), dtype=np.int32)}
    )
    return found


@pytest.mark.parametrize("early_cast", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_turns_are_sliced_from_a_table_when_positions_are_counted(first: int, early_cast: bool) -> None:
    model = graph_of(first=first, early_cast=early_cast)
    expected = {length: run(model, length) for length in (1, 2, _POSITIONS)}
    assert Positions().apply(model, CONTEXT) >= 2
    assert {node.op_type for node in model.graph} <= {"Shape", "Slice"}
    assert count_sites(model).sites["positions"] == 2
    angle = (np.arange(_POSITIONS) + first)[:, None] * np.concatenate([_FREQUENCIES, _FREQUENCIES])
    for length, before in expected.items():
        for after, plain, exact in zip(run(model, length), before, (np.cos(angle), np.sin(angle)), strict=True):
            np.testing.assert_allclose(after, plain, atol=1e-6)
            np.testing.assert_allclose(after[0], exact[:length], atol=1e-5)


def test_slice_ends_with_the_table_when_text_is_longer() -> None:
    model = graph_of()
    Positions().apply(model, CONTEXT)
    # The slice ends with the table; what is multiplied with it has the text's length, and the shapes differ.
    assert run(model, _POSITIONS + 1)[0].shape == (1, _POSITIONS, _WIDTH)


def test_turns_are_left_alone_when_they_depend_on_the_tokens() -> None:
    model = graph_of(shifted=True)
    assert all(find_turns(node) is None for node in model.graph)
    Positions().apply(model, CONTEXT)
    found = count_sites(model)
    assert found.sites["positions"] == 0
    assert "computed per request: 1 Cos, 1 Sin" in found.instead["positions"]
