from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from builders.errors import CompileError
from builders.precision import convert
from builders.rounding import round_fp16_casts
from builders.tensorrt.capabilities import capabilities_of, version_tuple
from builders.tensorrt.lower import lower
from builders.tensorrt.sites import find_sites
from builders.verify.runner import OnnxRunner
from tests.tensorrt.graphs import attention_feed, attention_graph

OLD, MIDDLE, NEW = (capabilities_of(version, rtx=False) for version in ((8, 6, 0), (10, 13, 0), (10, 14, 1)))


def run(model: ir.Model, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["EMBEDDING"], feed)[0]


def feed_of(length: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(1000, 20000, (4, length)).astype(np.int32)
    return {"input_ids": ids, "length": np.array([[length], [3], [length // 2], [1]], np.int32)}


def test_minilm_is_opset_17_and_equal_when_lowered_for_8_6(minilm_onnx: Path) -> None:
    model = ir.load(minilm_onnx)
    expected = run(model, feed_of(48))
    report = lower(model, OLD)
    assert (report.opset, report.expanded) == (17, {"Gelu": 6, "Shape": 2})
    # The parser of 8.6 reads no `start` and no `end`: one size would silently be the whole shape.
    assert all(not node.attributes for node in model.graph if node.op_type == "Shape")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 17)]
    assert proto.ir_version == 8
    assert np.abs(run(model, feed_of(48)) - expected).max() < 1e-5
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("Erf"), kinds.count("LayerNormalization"), kinds.count("Gelu")) == (6, 13, 0)
    # The places stay: the listing of an 8.6 plan is judged against the same table.
    sites = find_sites(model)
    found = (sites.attention, sites.layer_norm_residual, sites.gelu_bias, sites.qkv)
    assert [len(part) for part in found] == [6, 13, 6, 6]
    assert lower(model, OLD).expanded == {}


def test_fp16_graph_keeps_its_types_when_lowered_for_8_6(minilm_fp16: Path) -> None:
    model = ir.load(minilm_fp16)
    expected = OnnxRunner(round_fp16_casts(model), optimise=False).run(**feed_of(16))["EMBEDDING"]
    lower(model, OLD)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {str(node.outputs[0].dtype) for node in model.graph if node.op_type == "Erf"} == {"FLOAT16"}
    got = OnnxRunner(round_fp16_casts(model), optimise=False).run(**feed_of(16))["EMBEDDING"]
    assert np.abs(got - expected).max() < 1e-3


def test_nothing_changes_when_target_takes_the_graph(minilm_onnx: Path) -> None:
    model = ir.load(minilm_onnx)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert lower(model, NEW).opset == 20
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(("mask", "scale"), [(True, True), (False, False)])
@pytest.mark.parametrize(("target", "opset"), [(OLD, 17), (MIDDLE, 20)])
def test_attention_is_written_out_and_equal_when_target_lacks_it(
    rank: int, mask: bool, scale: bool, target: object, opset: int
) -> None:
    model = attention_graph(rank=rank, mask=mask, scale=scale)
    expected = run(model, attention_feed())
    report = lower(model, target)  # type: ignore[arg-type]
    assert (report.opset, report.expanded) == (opset, {"Attention": 1})
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert np.abs(run(model, attention_feed()) - expected).max() < 1e-5
    assert len(find_sites(model).attention) == 1


def test_softmax_is_fp32_when_fp16_attention_is_written_out() -> None:
    model = attention_graph()
    convert(model, "fp16")
    lower(model, OLD)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    types = {node.op_type: str(node.outputs[0].dtype) for node in model.graph}
    assert (types["Softmax"], types["MatMul"]) == ("FLOAT", "FLOAT16")


def test_attention_stays_when_target_has_it() -> None:
    model = attention_graph()
    assert lower(model, NEW).expanded == {}
    assert len(find_sites(model).attention) == 1


def test_refused_when_types_or_operators_are_unknown_to_the_target() -> None:
    model = attention_graph()
    convert(model, "bf16")
    with pytest.raises(CompileError, match=r"no BF16.*10 or newer.*use fp16"):
        lower(model, OLD)
    model = attention_graph()
    model.graph.inputs[0].type = ir.TensorType(ir.DataType.INT64)
    with pytest.raises(CompileError, match=r"input_ids.*INT64.*INT32"):
        lower(model, NEW)
    model = attention_graph()
    next(node for node in model.graph if node.op_type == "Attention").attributes.add(ir.AttrInt64("is_causal", 1))
    with pytest.raises(CompileError, match=r"cannot write out.*attention"):
        lower(model, OLD)


def test_capabilities_follow_the_version() -> None:
    assert version_tuple("10.14.1.48.post1") == (10, 14, 1, 48)
    assert (OLD.strong_typing, OLD.max_opset, OLD.profile_memory_per_context) == (False, 17, False)
    assert OLD.limited_tactics
    assert (MIDDLE.strong_typing, MIDDLE.attention_op, MIDDLE.gelu_op) == (True, False, True)
    assert capabilities_of((11, 0), rtx=False) == NEW
    rtx = capabilities_of((1, 7, 1, 116), rtx=True)
    assert (rtx.attention_op, rtx.strong_typing, rtx.timing_cache) == (True, True, False)
