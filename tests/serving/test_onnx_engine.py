"""The CPU engine on a tiny graph whose output tells what it was given: sum of the ids, length, and the L it saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from builders.serving.lane.config import LaneConfig
from builders.serving.lane.engine import open_engine, warm_up
from builders.serving.lane.onnx_engine import OnnxEngine


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["ids", "axis"], ["sum"], keepdims=1),
        helper.make_node("Cast", ["length"], ["tokens"], to=TensorProto.FLOAT),
        helper.make_node("Shape", ["input_ids"], ["width"], start=1, end=2),
        helper.make_node("Cast", ["width"], ["width_float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["tokens", "zero"], ["column"]),
        helper.make_node("Add", ["column", "width_float"], ["seen"]),
        helper.make_node("Concat", ["sum", "tokens", "seen"], ["EMBEDDING"], axis=1),
        helper.make_node("Identity", ["tokens"], ["OTHER"]),
        helper.make_node("Cast", ["segment_start"], ["start"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["ids", "start"], ["moved"]),
        helper.make_node("Unsqueeze", ["moved", "last"], ["TAGS"]),
    ]
    made = helper.make_graph(
        nodes,
        "tiny",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["b", "L"]),
            helper.make_tensor_value_info("length", TensorProto.INT32, ["b", 1]),
            helper.make_tensor_value_info("segment_start", TensorProto.INT32, ["b", 1]),
        ],
        [
            helper.make_tensor_value_info("OTHER", TensorProto.FLOAT, ["b", 1]),
            helper.make_tensor_value_info("EMBEDDING", TensorProto.FLOAT, ["b", 3]),
            helper.make_tensor_value_info("TAGS", TensorProto.FLOAT, ["b", "L", 1]),
        ],
        [
            helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
            helper.make_tensor("zero", TensorProto.FLOAT, [], [0]),
            helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        ],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    path = tmp_path_factory.mktemp("engine") / "model.onnx"
    onnx.save(model, str(path))
    return path


@pytest.fixture(scope="module")
def engine(graph: Path) -> OnnxEngine:
    return OnnxEngine(graph, output="EMBEDDING", per_token=False, threads=1)


def batch(*lengths: int, bucket: int = 16) -> dict[str, np.ndarray]:
    """Texts of 1, 2, 3 … repeated; padding is 0, and second texts begin at 1, 2, 3 …"""
    ids = np.zeros((len(lengths), bucket), dtype=np.int32)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
    places = np.arange(1, len(lengths) + 1, dtype=np.int32)[:, None]
    return {"input_ids": ids, "length": np.array(lengths, dtype=np.int32)[:, None], "segment_start": places}


def test_one_row_per_text_in_order(engine: OnnxEngine) -> None:
    vectors = engine.run(batch(5, 16, 3))
    assert vectors.dtype == np.float32
    assert vectors[:, :2].tolist() == [[5, 5], [32, 16], [9, 3]]


@pytest.mark.parametrize(("lengths", "seen"), [((5, 3), 5), ((16, 1), 16), ((15,), 15), ((1,), 1)])
def test_batch_trimmed_to_its_own_longest_text(engine: OnnxEngine, lengths: tuple[int, ...], seen: int) -> None:
    vectors = engine.run(batch(*lengths))
    assert vectors[:, 2].tolist() == [seen] * len(lengths)
    assert vectors[:, 0].tolist() == [length * (row + 1) for row, length in enumerate(lengths)]


def test_empty_rows_keep_one_token_of_width(engine: OnnxEngine) -> None:
    assert engine.run(batch(0, 0)).tolist() == [[0, 0, 1], [0, 0, 1]]


def test_callers_tensors_left_as_they_were(engine: OnnxEngine) -> None:
    inputs = batch(5, 3)
    before = {name: array.copy() for name, array in inputs.items()}
    engine.run(inputs)
    assert {name: array.tolist() for name, array in inputs.items()} == {n: a.tolist() for n, a in before.items()}
    assert inputs["input_ids"].shape == (2, 16)


def test_named_output_computed_where_there_are_several(graph: Path) -> None:
    assert OnnxEngine(graph, output="OTHER", per_token=False, threads=1).run(batch(5, 3)).tolist() == [[5], [3]]


def test_several_threads_give_the_same(graph: Path, engine: OnnxEngine) -> None:
    wide = OnnxEngine(graph, output="EMBEDDING", per_token=False, threads=2)
    assert (wide.run(batch(5, 9, 16)) == engine.run(batch(5, 9, 16))).all()


@pytest.mark.parametrize("lengths", [(5, 3), (16, 2)])
def test_output_of_each_token_comes_back_as_long_as_the_bucket(graph: Path, lengths: tuple[int, ...]) -> None:
    engine = OnnxEngine(graph, output="TAGS", per_token=True, threads=1)
    inputs = batch(*lengths)
    tags = engine.run(inputs)
    assert (tags.shape, tags.dtype) == ((2, 16, 1), np.float32)
    for row, start in enumerate(inputs["segment_start"][:, 0]):
        seen = max(lengths)
        assert tags[row, :seen, 0].tolist() == (inputs["input_ids"][row, :seen] + start).tolist()
        assert not tags[row, seen:].any()


def test_engine_opened_from_the_lanes_configuration_and_warmed_up(graph: Path) -> None:
    config = LaneConfig("onnxruntime", graph.name, 16, "EMBEDDING", False, True, (1, 2, 4), 1, 0)
    engine = open_engine(config, graph.parent)
    assert isinstance(engine, OnnxEngine)
    warm_up(engine, config)
    assert engine.run(batch(4)).tolist() == [[4, 4, 4]]


def test_missing_graph_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="gone"):
        OnnxEngine(tmp_path / "gone.onnx", output="EMBEDDING", per_token=False, threads=1)


def test_answers_of_the_full_optimiser_kept_without_its_sum_and_norm_kernel(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        block (int32[b, L] input_ids, int32[b, 1] length) => (float[b, L, 64] EMBEDDING) {
            x = Gather (table, input_ids)
            y = MatMul (x, weight)
            sum = Add (y, x)
            EMBEDDING = LayerNormalization <axis = -1> (sum, scale, bias)
        }"""
    random = np.random.default_rng(0)
    sizes = {"table": (50, 64), "weight": (64, 64), "scale": (64,), "bias": (64,)}
    model = onnx.parser.parse_model(text)
    arrays = {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    whole = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node}
    assert "SkipLayerNormalization" in kinds, "nothing is left out any more: measure again"
    ids, length = random.integers(0, 50, (3, 16)).astype(np.int32), np.full((3, 1), 16, dtype=np.int32)
    # per_token: such an answer is the whole [b, L, size].
    found = OnnxEngine(path, output="EMBEDDING", per_token=True, threads=1).run({"input_ids": ids, "length": length})
    (wanted,) = whole.run(["EMBEDDING"], {"input_ids": ids, "length": length})
    assert np.abs(found - wanted).max() < 1e-5
