from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from builders.contract import Contract
from builders.errors import ExportError
from builders.fuse import fuse
from builders.graph_file import (
    check_contract,
    data_file,
    graph_bytes,
    load_graph,
    save_graph,
    sha256_of_graph,
    weight_bytes,
)
from builders.precision import convert
from builders.rounding import round_fp16_casts
from builders.verify.runner import OUTPUT, Floats, OnnxRunner
from tests.fuse.models import HIDDEN, LAYERS

IDS = np.arange(2, 42, dtype=np.int32).reshape(2, 20)
LENGTH = np.array([[20], [7]], np.int32)
VECTOR = Contract(size=8)


def answer(model: ir.Model, *, optimise: bool = True) -> Floats:
    return OnnxRunner(model, optimise=optimise, threads=1).run(IDS, LENGTH)[OUTPUT]


def weights(model: ir.Model) -> dict[str, Floats]:
    return {n: np.array(v.const_value.numpy()) for n, v in model.graph.initializers.items() if v.const_value}


def assert_same_weights(got: ir.Model, expected: dict[str, Floats]) -> None:
    found = weights(got)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def graph_of(*, ids: int = onnx.TensorProto.INT32, dim: int = 8, value: float = 1.0) -> ir.Model:
    """The smallest graph with the contract; its one weight is 8 x 128."""
    info = helper.make_tensor_value_info
    table = np.full((128, dim), value, np.float32)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["rows"], name="rows"),
             helper.make_node("ReduceMean", ["rows", "axes"], ["EMBEDDING"], name="pool", keepdims=0)]  # fmt: skip
    inputs = [info("input_ids", ids, ["b", "L"]), info("length", onnx.TensorProto.INT32, ["b", 1])]
    outputs = [info("EMBEDDING", onnx.TensorProto.FLOAT, ["b", dim])]
    constants = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([1]), "axes")]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, constants)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def test_whole_way_gives_the_same_answers_when_weights_lie_beside_the_graph(
    small_onnx: Path, small_external: Path, tmp_path: Path
) -> None:
    results = {}
    for name, path, above in (("inside", small_onnx, 10**9), ("beside", small_external, 0)):
        folder = Path(shutil.copytree(path.parent, tmp_path / f"{name}-copied"))
        model = load_graph(folder / "model.onnx")
        shutil.rmtree(folder)  # the model does not need its files any more
        exact = answer(model)
        fuse(model, family="bert", layers=LAYERS)
        fused = answer(model)
        convert(model, "fp16")
        saved = save_graph(model, tmp_path / f"{name}-saved" / "graph.onnx", external_above=above)
        assert data_file(saved).exists() == (name == "beside")
        moved = Path(shutil.move(saved.parent, tmp_path / f"{name}-moved")) / "graph.onnx"
        narrow = answer(round_fp16_casts(load_graph(moved)), optimise=False)
        served = onnxruntime.InferenceSession(str(moved)).run(None, {"input_ids": IDS, "length": LENGTH})[0]
        results[name] = (exact, fused, narrow, served)
    for got, expected in zip(results["beside"], results["inside"], strict=True):
        np.testing.assert_array_equal(got, expected)
    exact, fused, narrow, _ = results["beside"]
    np.testing.assert_allclose(fused, exact, atol=2e-5)
    np.testing.assert_allclose(narrow, exact, atol=2e-2)


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard links", "symbolic links"])
def test_weights_are_read_when_the_folder_is_of_links(
    link: Callable[[Path, Path], None], small_external: Path, small_onnx: Path, tmp_path: Path
) -> None:
    for path in small_external.parent.iterdir():
        link(path, tmp_path / path.name)
    assert_same_weights(load_graph(tmp_path / "model.onnx"), weights(load_graph(small_onnx)))
    for path in tmp_path.iterdir():
        path.unlink()  # the session's fixture again has one link


def test_weights_are_mapped_when_loaded(small_external: Path) -> None:
    model = load_graph(small_external)
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    largest = max((v.const_value for v in model.graph.initializers.values() if v.const_value), key=lambda t: t.nbytes)
    array = largest.numpy()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_weights_in_attributes_are_read_when_external(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.arange(1024, dtype=np.float32), "t")
    node = helper.make_node("Constant", [], ["EMBEDDING"], value=table)
    output = helper.make_tensor_value_info("EMBEDDING", onnx.TensorProto.FLOAT, [1024])
    proto = helper.make_model(helper.make_graph([node], "g", [], [output]), ir_version=10)
    onnx.save_model(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", convert_attribute=True)
    assert (tmp_path / "w.bin").exists()
    model = load_graph(tmp_path / "m.onnx")
    whole = save_graph(model, tmp_path / "other" / "m.onnx")
    (result,) = onnxruntime.InferenceSession(str(whole)).run(None, {})
    np.testing.assert_array_equal(result, np.arange(1024, dtype=np.float32))


def test_graph_is_whole_when_saved_from_tensors_that_name_a_file(
    small_external: Path, small_onnx: Path, tmp_path: Path
) -> None:
    model = ir.load(small_external)
    saved = save_graph(model, tmp_path / "model.onnx")
    assert names(tmp_path) == ["model.onnx"]
    assert_same_weights(load_graph(saved), weights(load_graph(small_onnx)))


def test_stale_data_is_removed_when_a_smaller_graph_is_saved(tmp_path: Path) -> None:
    path = save_graph(graph_of(), tmp_path / "model.onnx", external_above=0)
    assert names(tmp_path) == ["model.onnx", "model.onnx.data"]
    save_graph(graph_of(value=2.0), path)
    assert names(tmp_path) == ["model.onnx"]
    assert weights(load_graph(path))["table"].max() == 2.0
    assert graph_bytes(path) == path.stat().st_size


def test_model_keeps_its_weights_when_its_file_is_replaced(tmp_path: Path) -> None:
    path = save_graph(graph_of(value=1.0), tmp_path / "model.onnx", external_above=0)
    first = load_graph(path)
    lazy = ir.load(path)
    save_graph(lazy, path, external_above=0)  # onto itself
    save_graph(graph_of(value=3.0), path, external_above=0)
    assert weights(first)["table"].max() == weights(lazy)["table"].max() == 1.0
    assert weights(load_graph(path))["table"].min() == 3.0


def test_what_was_there_stays_when_the_check_fails(tmp_path: Path) -> None:
    path = save_graph(graph_of(), tmp_path / "model.onnx", external_above=0)
    before = sha256_of_graph(path)

    def refuse(draft: Path) -> None:
        assert weight_bytes(load_graph(draft)) == weight_bytes(graph_of())
        raise ExportError("refused")

    for above in (0, 10**9):
        with pytest.raises(ExportError, match="refused"):
            save_graph(graph_of(value=2.0), path, external_above=above, check=refuse)
    assert names(tmp_path) == ["model.onnx", "model.onnx.data"]
    assert sha256_of_graph(path) == before


@pytest.mark.parametrize("above", [0, 10**9])
def test_no_graph_has_weights_of_another_when_killed_between_the_renames(
    above: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_graph(graph_of(), tmp_path / "model.onnx", external_above=0)
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == "model.onnx":
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save_graph(graph_of(value=2.0), path, external_above=above)
    assert not path.exists()
    assert graph_bytes(path) == 0
    save_graph(graph_of(value=2.0), path)
    assert names(tmp_path) == ["model.onnx"]


def test_draft_of_a_killed_process_does_not_matter(tmp_path: Path) -> None:
    for name in (f".{os.getpid()}", ".model.onnx.abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(b"half")
    path = save_graph(graph_of(), tmp_path / "model.onnx", external_above=0)
    assert np.isfinite(answer(load_graph(path))).all()


def test_size_and_hash_take_in_the_data_beside_the_graph(small_external: Path) -> None:
    graph, data = small_external.read_bytes(), data_file(small_external).read_bytes()
    assert graph_bytes(small_external) == len(graph) + len(data)
    assert sha256_of_graph(small_external) == hashlib.sha256(graph + data).hexdigest()


def test_hash_changes_when_data_of_another_name_changes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(graph_of(), path, external_data="weights.bin")
    before = sha256_of_graph(path)
    content = bytearray((tmp_path / "weights.bin").read_bytes())
    content[7] ^= 1
    (tmp_path / "weights.bin").write_bytes(content)
    assert sha256_of_graph(path) != before


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.onnx.data", 100)


def _empty(folder: Path) -> None:
    os.truncate(folder / "model.onnx.data", 0)


def _remove(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()


def _point_outside(folder: Path) -> None:
    proto = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    entry = next(e for t in proto.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = "../model.onnx.data"
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def _garble(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"\xff" * 50)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "data cannot be read"),
        (_empty, "data cannot be read"),
        (_remove, r"data cannot be read.*No such file.*model\.onnx\.data"),
        (_point_outside, "lies outside the graph's folder"),
        (_garble, "no ONNX graph"),
        (shutil.rmtree, "no such ONNX file"),
    ],
)
def test_refused_when_files_are_damaged(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    path = save_graph(graph_of(), tmp_path / "made" / "model.onnx", external_above=0)
    before = sha256_of_graph(path)
    damage(path.parent)
    if path.exists():
        assert sha256_of_graph(path) != before  # and no error: a cache asks whether to make it again
    with pytest.raises(ExportError, match=words):
        load_graph(path)


def _extra_input(model: ir.Model) -> None:
    model.graph.inputs.append(ir.Value(name="token_type_ids", type=ir.TensorType(ir.DataType.INT32)))


def _no_length(model: ir.Model) -> None:
    del model.graph.inputs[1]


def _second_output(model: ir.Model) -> None:
    model.graph.outputs.append(model.graph.node("rows").outputs[0])


def _half_output(model: ir.Model) -> None:
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)


def _reshape(place: int, *sizes: int | str) -> Callable[[ir.Model], None]:
    def edit(model: ir.Model) -> None:
        (*model.graph.inputs, *model.graph.outputs)[place].shape = ir.Shape(sizes)

    return edit


def _no_shape(model: ir.Model) -> None:
    model.graph.outputs[0].shape = None


@pytest.mark.parametrize(
    "edit",
    [
        _extra_input,
        _no_length,
        _second_output,
        _half_output,
        _reshape(0, "b", 16),
        _reshape(0, 1, "L"),
        _reshape(0, "b"),
        _reshape(1, "b"),
        _reshape(1, "b", "L"),
        _reshape(2, "b", "L", 8),
        _reshape(2, "b", "d"),
        _no_shape,
    ],
)
def test_refused_when_inputs_or_outputs_are_others(edit: Callable[[ir.Model], None]) -> None:
    model = graph_of()
    check_contract(model, VECTOR, positions=512)
    edit(model)
    with pytest.raises(ExportError, match="has not the lanes' contract") as refused:
        check_contract(model, VECTOR, positions=512)
    assert refused.value.limit is not None
    assert "FLOAT [b, 8]" in refused.value.limit
    assert "L from 1 to 512" in refused.value.limit
    assert refused.value.remedy


def test_refused_with_both_sizes_when_vectors_are_of_another_length() -> None:
    with pytest.raises(ExportError, match=r"FLOAT \[b, 8\].*limit: .*FLOAT \[b, 16\]"):
        check_contract(graph_of(), Contract(size=16))


def test_refused_with_the_type_when_token_numbers_are_64_bits() -> None:
    with pytest.raises(ExportError, match=r"'input_ids': 'INT64 \[b, L\]'"):
        check_contract(graph_of(ids=onnx.TensorProto.INT64), VECTOR)


def test_refused_with_the_node_when_an_operator_is_foreign() -> None:
    model = graph_of()
    model.graph.node("pool").domain = "com.microsoft"
    with pytest.raises(ExportError, match=r"com\.microsoft::ReduceMean \(node pool\).*to do: "):
        check_contract(model, VECTOR)


def test_graph_of_a_tagger_for_pairs_has_its_own_contract() -> None:
    model = graph_of()
    contract = Contract("TAGS", 8, per_token=True, segment=True)
    with pytest.raises(ExportError, match=r"segment_start INT32 \[b, 1\], output TAGS FLOAT \[b, L, 8\]"):
        check_contract(model, contract)
    start = ir.Value(name="segment_start", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["b", 1]))
    model.graph.inputs.append(start)
    model.graph.outputs[0].name = "TAGS"
    with pytest.raises(ExportError, match=r"'TAGS': 'FLOAT \[b, 8\]'"):
        check_contract(model, contract)
    model.graph.outputs[0].shape = ir.Shape(["b", "L", 8])
    check_contract(model, contract)
    with pytest.raises(ExportError, match="has not the lanes' contract"):
        check_contract(model, Contract("TAGS", 8, per_token=True))


def test_exported_graph_has_the_contract(small_onnx: Path) -> None:
    check_contract(load_graph(small_onnx), Contract(size=HIDDEN), positions=200)
