from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

import builders.export
from builders.encoder import load_encoder
from builders.errors import ExportError, SourceError
from builders.export import ExportReport, export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from tests.texts import mixed_texts, real_texts

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Served:
    """The exported graph behind the written tokenizer, as a lane feeds it."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.tokenizer = tokenizer

    def encode(self, texts: list[str], *, extra: int = 0) -> Floats:
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        # Padding holds a real word's number: whatever is there must not matter.
        ids = np.full((len(rows), max(map(len, rows)) + extra), 2000, dtype=np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        length = np.array([[len(row)] for row in rows], dtype=np.int32)
        result: Floats = self.session.run(["EMBEDDING"], {"input_ids": ids, "length": length})[0]
        return result


@pytest.fixture(scope="module")
def tokenizer(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = Tokenizer.from_file(str(write_tokenizer(minilm_source, tmp_path_factory.mktemp("tokenizer"))))
    loaded.enable_truncation(512)
    return loaded


@pytest.fixture(scope="module")
def served(minilm_onnx: Path, tokenizer: Tokenizer) -> Served:
    return Served(minilm_onnx, tokenizer)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> list[str]:
    """300 texts of 1 to 512 content tokens: with the special tokens the last ones are cut."""
    return real_texts(300, tokenizer, (1, 512))


@pytest.fixture(scope="module")
def library(minilm_source: EncoderSource) -> Callable[[list[str]], Floats]:
    """sentence-transformers' own pipeline on the same folder."""
    from sentence_transformers import SentenceTransformer

    pipeline = SentenceTransformer(str(minilm_source.folder), device="cpu", local_files_only=True)
    pipeline.max_seq_length = 512

    def encode(texts: list[str]) -> Floats:
        vectors: Floats = pipeline.encode(texts, batch_size=16, show_progress_bar=False)
        return vectors

    return encode


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, minilm_source: EncoderSource) -> EncoderSource:
    """Two random layers with CLS pooling, not normalised."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    shutil.copy(minilm_source.folder / "tokenizer.json", folder)
    return open_source(ModelSettings(source=str(folder), pooling="cls"))


def least_cosine(a: Floats, b: Floats) -> float:
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


def test_graph_has_the_contract_when_exported(minilm_report: ExportReport, minilm_source: EncoderSource) -> None:
    graph = onnx.load(minilm_report.path).graph
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {"input_ids": ["b", "L"], "length": ["b", 1], "EMBEDDING": ["b", 384]}
    assert {node.domain for node in graph.node} == {""}
    layers = minilm_source.layers
    assert minilm_report.nodes["LayerNormalization"] == 2 * layers + 1
    assert minilm_report.nodes["Gelu"] == minilm_report.nodes["Softmax"] == layers


def test_report_describes_the_file_when_exported(minilm_report: ExportReport) -> None:
    content = minilm_report.path.read_bytes()
    assert minilm_report.bytes == len(content)
    assert minilm_report.sha256 == hashlib.sha256(content).hexdigest()
    assert (minilm_report.opset, minilm_report.external) == (20, None)
    assert minilm_report.least_cosine >= 0.99999
    assert sorted(path.name for path in minilm_report.path.parent.iterdir()) == ["model.onnx"]
    assert str(Path(builders.export.__file__).parent).encode() not in content  # no stack traces


def test_vectors_equal_sentence_transformers_when_alone(
    served: Served, texts: list[str], library: Callable[[list[str]], Floats]
) -> None:
    chosen = texts[::8]
    got = np.concatenate([served.encode([text]) for text in chosen])
    assert least_cosine(got, library(chosen)) >= 0.9999


@pytest.mark.slow  # the fast proof, through the whole service: tests/integration/test_answers.py
def test_vectors_equal_sentence_transformers_when_batched_with_other_lengths(
    served: Served, texts: list[str], library: Callable[[list[str]], Floats]
) -> None:
    expected = library(texts)
    got = np.concatenate([served.encode(texts[i : i + 8]) for i in range(0, 300, 8)])
    assert least_cosine(got, expected) >= 0.9999
    # Order kept: nothing is as near to a text as its own vector.
    assert (np.argmax(got @ expected.T, axis=1) == np.arange(300)).mean() > 0.99


def test_vectors_stay_when_padded_further(served: Served) -> None:
    texts = mixed_texts(6, seed=3)[:2]
    np.testing.assert_allclose(served.encode(texts, extra=64), served.encode(texts), atol=2e-6)


@pytest.mark.parametrize("content", [509, 510, 511, 600])
def test_text_is_encoded_when_at_the_limit(served: Served, tokenizer: Tokenizer, content: int) -> None:
    (text,) = real_texts(1, tokenizer, (content, content))
    assert np.isfinite(served.encode([text])).all()


def test_rows_are_finite_when_length_is_zero_or_batch_is_one_token(served: Served) -> None:
    for ids, length in ((np.zeros((3, 16)), [[0], [5], [0]]), (np.zeros((1, 1)), [[1]])):
        feed = {"input_ids": ids.astype(np.int32), "length": np.array(length, dtype=np.int32)}
        assert np.isfinite(served.session.run(None, feed)[0]).all()


def test_torch_module_is_finite_when_in_half_precision(minilm_source: EncoderSource) -> None:
    encoder = load_encoder(minilm_source).to(torch.float16)
    ids = torch.ones(2, 300, dtype=torch.int32)
    vectors = encoder(ids, torch.tensor([[0], [300]], dtype=torch.int32))
    assert vectors.dtype == torch.float32
    assert torch.isfinite(vectors).all()


def test_cls_vector_is_first_token_when_pooling_is_cls(tiny: EncoderSource, tmp_path: Path) -> None:
    from transformers import AutoModel

    report = export_onnx(tiny, tmp_path / "model.onnx")
    ids = np.arange(2, 22, dtype=np.int32).reshape(2, 10)
    length = np.array([[10], [4]], dtype=np.int32)
    got = onnxruntime.InferenceSession(str(report.path)).run(None, {"input_ids": ids, "length": length})[0]
    model = AutoModel.from_pretrained(tiny.folder).eval()
    mask = torch.arange(10)[None] < torch.from_numpy(length)
    with torch.no_grad():
        hidden = model(input_ids=torch.from_numpy(ids).long(), attention_mask=mask.long()).last_hidden_state
    np.testing.assert_allclose(got, hidden[:, 0].numpy(), atol=1e-5)  # not normalised either


@pytest.mark.slow  # the fast proof: tests/families/test_graphs.py, with a head
@pytest.mark.parametrize(("head", "output"), [("TokenClassification", "TAGS"), ("QuestionAnswering", "SPANS")])
def test_rows_equal_transformers_when_task_answers_for_each_token(
    head: str, output: str, tiny: EncoderSource, tmp_path: Path
) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny.folder, num_labels=5 if output == "TAGS" else 2)
    model = getattr(transformers, f"BertFor{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    shutil.copy(tiny.folder / "tokenizer.json", tmp_path)
    source = open_source(ModelSettings(source=str(tmp_path)))
    report = export_onnx(source, tmp_path / "model.onnx")

    ids = np.random.default_rng(0).integers(1, 30522, (3, 12)).astype(np.int32)
    length, start = np.array([[12], [7], [1]], np.int32), np.array([[5], [7], [0]], np.int32)
    real = np.arange(12)[None] < length
    types = ((np.arange(12)[None] >= start) & real) if source.task.segment else np.zeros_like(real)
    feeds = {"input_ids": ids, "length": length, "segment_start": start}
    got = onnxruntime.InferenceSession(str(report.path)).run(
        [output], {name: feeds[name] for name in source.task.contract.inputs}
    )[0]
    with torch.no_grad():
        found = model(*(torch.from_numpy(array).long() for array in (ids, real, types)))
    if output == "TAGS":
        expected = torch.softmax(found.logits, -1)
    else:
        expected = torch.stack((found.start_logits, found.end_logits), -1)
    assert got.shape == expected.shape
    assert expected.std() > 1e-3
    np.testing.assert_allclose(got[real], expected.numpy()[real], atol=1e-5)
    assert source.task.segment == (output == "SPANS")


def test_failed_export_is_told_in_one_line_and_kept_whole_in_a_file(
    tiny: EncoderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise ValueError("\nthis operator has no translation\nand a second line")
        except ValueError as error:
            raise RuntimeError("step 1 of 3 failed\nnext steps: page two") from error

    monkeypatch.setattr("torch.onnx.export", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ExportError) as caught:
        export_onnx(tiny, tmp_path / "model.onnx")
    message = str(caught.value)
    assert "\n" not in message
    assert "ValueError: this operator has no translation" in message
    (report,) = tmp_path.glob("export.*.txt")
    assert str(report) in message
    assert all(words in report.read_text() for words in ("page two", "a second line", "Traceback"))


def test_weights_lie_beside_the_file_when_above_the_limit(tiny: EncoderSource, tmp_path: Path) -> None:
    report = export_onnx(tiny, tmp_path / "model.onnx", external_above=0)
    assert report.external == tmp_path / "model.onnx.data"
    assert report.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert report.path.stat().st_size < report.external.stat().st_size
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (report.path, report.external):
        shutil.move(path, moved)
    feed = {"input_ids": np.ones((1, 4), np.int32), "length": np.array([[4]], np.int32)}
    assert np.isfinite(onnxruntime.InferenceSession(str(moved / "model.onnx")).run(None, feed)[0]).all()


def test_nothing_is_written_when_graph_differs_from_torch(
    tiny: EncoderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders.export, "_LEAST_COSINE", 1.1)
    (tmp_path / "model.onnx").write_bytes(b"before")
    with pytest.raises(ExportError, match=r"differs from the torch model.*cosine 1\.1"):
        export_onnx(tiny, tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"before"


def test_export_says_nothing_when_it_works(
    tiny: EncoderSource, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    export_onnx(tiny, tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)


def test_refused_when_weights_lack_tensors(tiny: EncoderSource, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "partial"
    shutil.copytree(tiny.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lack tensors.*encoder\.layer\.1\.output\.dense\.weight"):
        load_encoder(replace(tiny, folder=folder))


def test_refused_when_weights_are_damaged(tiny: EncoderSource, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny.folder, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(SourceError, match="cannot be loaded"):
        load_encoder(replace(tiny, folder=folder))
