from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from builders.errors import PrecisionError
from builders.precision import Precision, convert
from builders.quantize import quantize
from builders.rounding import round_fp16_casts

Floats = np.ndarray[Any, np.dtype[np.float32]]
NARROW: tuple[Precision, ...] = ("fp16", "bf16")


def feed_of(length: int = 40) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(1000, 20000, (4, length)).astype(np.int32)
    return {"input_ids": ids, "length": np.array([[length], [3], [length // 2], [1]], np.int32)}


def run(model: ir.Model, feed: dict[str, Any], names: list[str] | None = None, *, optimise: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    if not optimise:
        # The optimiser would take the rounding casts out again.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]).run(names, feed)


def least_cosine(a: Floats, b: Floats) -> float:
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


def converted(path: Path, precision: Precision) -> ir.Model:
    model = ir.load(path)
    convert(model, precision)
    return model


def norm_graph(*, large: float = 1.0, stash: int = 1) -> ir.Model:
    """One norm over 64 channels, of which one is `large` times the others, and a residual sum before it."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        norm (float[b, 64] x) => (float[b, 64] EMBEDDING) {{
            sum = Add (x, x)
            EMBEDDING = LayerNormalization <axis = -1, epsilon = 1e-12, stash_type = {stash}> (sum, scale, bias)
        }}"""
    model = onnx.parser.parse_model(text)
    scale = np.ones(64, np.float32)
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(scale, "scale"), onnx.numpy_helper.from_array(scale * 0, "bias")]
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


@pytest.mark.parametrize("precision", NARROW)
def test_types_are_explicit_when_converted(minilm_onnx: Path, precision: Precision) -> None:
    model = ir.load(minilm_onnx)
    report = convert(model, precision)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)  # its type inference agrees with every type
    kind = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[precision]
    assert report.narrow.items() >= {"MatMul": 48, "LayerNormalization": 13, "Gelu": 6, "Gather": 2, "Where": 1}.items()
    assert report.wide == {
        "Softmax": 6, "Div": 2, "Mul": 1, "ReduceSum": 1, "ReduceL2": 1, "Clip": 1, "Unsqueeze": 1
    }  # fmt: skip
    assert report.casts == 2 * 6 + 1  # around each softmax, before the pooling
    assert 44e6 < report.weight_bytes < 46e6
    weights = [value for value in model.graph.initializers.values() if len(value.shape or ()) == 2]
    assert {value.dtype for value in weights} == {kind}
    assert [value.dtype for value in model.graph.inputs] == [ir.DataType.INT32] * 2
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("EMBEDDING", ir.DataType.FLOAT)]


def split_graph() -> ir.Model:
    """A product cut in three, as a merged QKV is; all parts are used."""
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        split (float[b, 6] x) => (float[b, 2] EMBEDDING) {
            whole = MatMul (x, weight)
            first, second, third = Split <axis = -1> (whole, sizes)
            sum = Add (first, second)
            EMBEDDING = Add (sum, third)
        }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(4).standard_normal((6, 6)).astype(np.float32)
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(weight, "weight"), onnx.numpy_helper.from_array(np.array([2, 2, 2]), "sizes")]
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def test_every_part_is_fp16_when_a_split_is_converted() -> None:
    model = split_graph()
    report = convert(model, "fp16")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    (split,) = (node for node in model.graph if node.op_type == "Split")
    assert [value.dtype for value in split.outputs] == [ir.DataType.FLOAT16] * 3
    assert report.casts == 2  # of the input and of the output, none behind the parts
    feed = {"x": np.random.default_rng(5).standard_normal((3, 6)).astype(np.float32)}
    (expected,), (got,) = run(split_graph(), feed), run(round_fp16_casts(model), feed)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.02)
    assert np.array_equal(got, got.astype(np.float16))


@pytest.mark.parametrize("precision", ["fp32", *NARROW])
def test_nothing_changes_when_converted_again(minilm_onnx: Path, precision: Precision) -> None:
    model = ir.load(minilm_onnx)
    report = convert(model, precision)
    first = ir.to_proto(model).SerializeToString(deterministic=True)
    assert convert(model, precision) == report
    assert ir.to_proto(model).SerializeToString(deterministic=True) == first


def test_source_stays_when_a_clone_is_converted(minilm_onnx: Path) -> None:
    model = ir.load(minilm_onnx)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    copy = model.clone()
    convert(copy, "fp16")
    round_fp16_casts(copy)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_norm_statistics_are_fp32_when_converted(minilm_onnx: Path) -> None:
    model = converted(minilm_onnx, "fp16")
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert [node.attributes["stash_type"].as_int() for node in norms] == [1] * 13
    narrow = norm_graph(stash=10)
    convert(narrow, "fp16")
    assert next(n for n in narrow.graph if n.op_type == "LayerNormalization").attributes["stash_type"].as_int() == 1


def test_vectors_are_near_fp32_when_fp16_runs(minilm_onnx: Path) -> None:
    expected = run(ir.load(minilm_onnx), feed_of())[0]
    model = converted(minilm_onnx, "fp16")
    assert least_cosine(run(model, feed_of())[0], expected) > 0.9999
    rounded = run(round_fp16_casts(model), feed_of(), optimise=False)[0]
    assert rounded.dtype == np.float32
    assert least_cosine(rounded, expected) > 0.9999
    assert not np.array_equal(rounded, expected)


def test_vectors_are_near_fp32_when_bf16_is_rounded(minilm_onnx: Path) -> None:
    expected = run(ir.load(minilm_onnx), feed_of())[0]
    rounded = run(round_fp16_casts(converted(minilm_onnx, "bf16")), feed_of(), optimise=False)[0]
    assert 0.999 < least_cosine(rounded, expected) < 0.999999  # 8 bits: visibly rounded


def test_every_fp16_tensor_is_rounded_when_rewritten(minilm_onnx: Path) -> None:
    model = round_fp16_casts(converted(minilm_onnx, "fp16"))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    narrow = [node for node in model.graph if node.outputs[0].dtype == ir.DataType.FLOAT16]
    assert {node.op_type for node in narrow} == {"Cast"}
    for node in narrow:
        assert {use.node.op_type for use in node.outputs[0].uses()} == {"Cast"}
    assert {value.dtype for value in model.graph.initializers.values()} <= {1, 6, 7}  # FLOAT, INT32, INT64
    names = {value.name for node in converted(minilm_onnx, "fp16").graph for value in node.outputs}
    assert names <= {value.name for node in model.graph for value in node.outputs}  # the gate finds every block output


def test_rounded_tensors_hold_fp16_numbers_when_run(minilm_onnx: Path) -> None:
    model = round_fp16_casts(converted(minilm_onnx, "fp16"))
    value = next(v for node in model.graph for v in node.outputs if v.name == "layer_norm_6")
    model.graph.outputs.append(value)
    (block,) = run(model, feed_of(), ["layer_norm_6"], optimise=False)
    assert np.array_equal(block, block.astype(np.float16).astype(np.float32))


def test_norm_is_finite_when_one_channel_is_500_times_the_others() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    rows[:, 7] *= 500
    rows[0, 7] = 500.0  # doubled by the residual sum; its square is above 65504
    expected = run(norm_graph(), {"x": rows})[0]
    model = norm_graph()
    convert(model, "fp16")
    rounded = run(round_fp16_casts(model), {"x": rows}, optimise=False)[0]
    assert np.isfinite(rounded).all()
    assert np.abs(rounded - expected).max() < 0.01
    assert np.isfinite(run(model, {"x": rows})[0]).all()


def test_overflow_shows_when_norm_statistics_are_fp16() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    rows[:, 7] = 500
    model = norm_graph()
    convert(model, "fp16")
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    norm.attributes.add(ir.AttrInt64("stash_type", 10))
    expected = run(norm_graph(), {"x": rows})[0]
    rounded = run(round_fp16_casts(model), {"x": rows}, optimise=False)[0]
    # The variance is infinite, so everything becomes 0 (or NaN): wrong, and seen.
    assert not np.isfinite(rounded).all() or np.abs(rounded - expected).max() > 1


def test_mask_is_finite_when_fp16(minilm_onnx: Path) -> None:
    model = converted(minilm_onnx, "fp16")
    where = next(node for node in model.graph if node.op_type == "Where")
    seen, masked = (float(where.inputs[place].const_value.numpy()) for place in (1, 2))  # type: ignore[union-attr]
    assert (seen, masked) == (0.0, -10000.0)
    feed = feed_of() | {"length": np.array([[40], [0], [0], [1]], np.int32)}
    assert np.isfinite(run(model, feed)[0]).all()
    assert np.isfinite(run(round_fp16_casts(model), feed, optimise=False)[0]).all()


@pytest.mark.parametrize("bound", [-3.4028235e38, -np.inf])
@pytest.mark.parametrize("precision", NARROW)
def test_mask_is_made_finite_when_source_has_another(minilm_onnx: Path, precision: Precision, bound: float) -> None:
    model = ir.load(minilm_onnx)
    where = next(node for node in model.graph if node.op_type == "Where")
    mask = where.inputs[2]
    assert mask is not None
    mask.const_value = ir.tensor(np.array(bound, np.float32), name=mask.name)
    report = convert(model, precision)
    assert report.clamped == (mask.name,)
    feed = feed_of() | {"length": np.array([[40], [0], [0], [1]], np.int32)}
    assert np.isfinite(run(round_fp16_casts(model), feed, optimise=False)[0]).all()


def test_refused_when_a_weight_leaves_the_range(minilm_onnx: Path) -> None:
    model = ir.load(minilm_onnx)
    bias = model.graph.initializers["backbone.model.encoder.layer.0.output.LayerNorm.bias"]
    numbers = bias.const_value.numpy().copy()  # type: ignore[union-attr]
    numbers[5] = 7e4
    bias.const_value = ir.tensor(numbers, name=bias.name)
    with pytest.raises(PrecisionError, match=r"0\.output\.LayerNorm\.bias does not fit FLOAT16: 70000.*use bf16"):
        convert(model.clone(), "fp16")
    convert(model, "bf16")


def test_refused_when_another_type_is_there(minilm_onnx: Path) -> None:
    model = converted(minilm_onnx, "fp16")
    for precision in ("bf16", "fp32"):
        with pytest.raises(PrecisionError, match=r"already holds another.*FLOAT16.*exported FP32"):
            convert(model, precision)
    with pytest.raises(PrecisionError, match=r"no type of a whole graph: 'int8'.*builders.int8.*quantize"):
        convert(model, "int8")  # type: ignore[arg-type]


def test_quantisation_names_the_package_when_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match=r"fp8 needs NVIDIA Model Optimizer.*nvidia-modelopt\[onnx\]"):
        quantize(tmp_path / "model.onnx", tmp_path / "fp8.onnx", "fp8", {})
    with pytest.raises(PrecisionError, match="no such quantisation: 'int4'"):
        quantize(tmp_path / "model.onnx", tmp_path / "int4.onnx", "int4", {})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
