"""Folders that sentence-transformers itself saved, against the library's own answers on the same texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer

from builders.encoder import load_encoder
from builders.export import export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from tests.texts import mixed_texts

Floats = np.ndarray[Any, np.dtype[np.float32]]

WIDTH, LIMIT = 32, 64
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TEXTS = ["a", "How far is the moon?", *mixed_texts(6, seed=1)]
PAIRS = list(zip(TEXTS[::-1], TEXTS, strict=True))


@pytest.fixture(scope="module")
def base(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random BERT layers with MiniLM's words; the weights are spread so that tokens differ."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LIMIT, num_labels=1,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (minilm_source.folder / name).is_file():
            shutil.copy(minilm_source.folder / name, folder)
    return folder


def saved(base: Path, folder: Path, *modules: torch.nn.Module) -> SentenceTransformer:
    """A pipeline of the library, saved by it and loaded again, so that the folder is what is compared."""
    SentenceTransformer(modules=[Transformer(str(base), max_seq_length=LIMIT), *modules], device="cpu").save(
        str(folder)
    )
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def expected(pipeline: SentenceTransformer) -> Floats:
    vectors: Floats = pipeline.encode(TEXTS, batch_size=3, show_progress_bar=False)
    return vectors


def feed(source: EncoderSource, folder: Path, texts: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """All texts in one batch, padded with a real word: the library's tokens, cut as the library cuts."""
    tokenizer = Tokenizer.from_file(str(write_tokenizer(source, folder)))
    tokenizer.enable_truncation(source.max_tokens)
    rows = tokenizer.encode_batch(texts)
    ids = np.full((len(rows), LIMIT), 2000, dtype=np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
    length = np.array([[len(row.ids)] for row in rows], dtype=np.int32)
    starts = [[row.type_ids.index(1) if 1 in row.type_ids else len(row.ids)] for row in rows]
    feeds = {"input_ids": ids, "length": length, "segment_start": np.array(starts, dtype=np.int32)}
    return {name: feeds[name] for name in source.task.contract.inputs}


def answer_of_torch(source: EncoderSource, folder: Path, texts: list[Any]) -> Floats:
    feeds = [torch.from_numpy(array) for array in feed(source, folder, texts).values()]
    answer: Floats = load_encoder(source)(*feeds).numpy()
    return answer


def answer_of_graph(source: EncoderSource, folder: Path, texts: list[Any]) -> Floats:
    path = export_onnx(source, folder / "model.onnx").path
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answer: Floats = session.run([source.task.output], feed(source, folder, texts))[0]
    return answer


def least_cosine(got: Floats, wanted: Floats) -> float:
    assert got.shape == wanted.shape
    assert wanted.std(axis=0).max() > 1e-3, "texts differ: a constant answer would pass everything"
    return float(((got * wanted).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(wanted, axis=-1)).min())


def opened(folder: Path, **settings: Any) -> EncoderSource:
    return open_source(ModelSettings(source=str(folder), **settings))


@pytest.mark.parametrize("mode", MODES)
def test_vector_is_the_librarys_when_pooled_by(mode: str, base: Path, tmp_path: Path) -> None:
    wanted = expected(saved(base, tmp_path / "model", Pooling(WIDTH, pooling_mode=mode)))
    got = answer_of_torch(opened(tmp_path / "model"), tmp_path, TEXTS)
    assert least_cosine(got, wanted) >= 0.9999
    # Not normalised: the length counts too.
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_graph_gives_the_librarys_vector_when_all_modes_are_joined(base: Path, tmp_path: Path) -> None:
    wanted = expected(saved(base, tmp_path / "model", Pooling(WIDTH, pooling_mode=MODES)))
    got = answer_of_graph(opened(tmp_path / "model"), tmp_path, TEXTS)
    for place, mode in enumerate(MODES):
        part = slice(place * WIDTH, (place + 1) * WIDTH)
        assert least_cosine(got[:, part], wanted[:, part]) >= 0.9999, mode


def test_graph_gives_the_librarys_vector_with_dense_modules(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    modules = (
        Pooling(WIDTH, pooling_mode=("mean", "cls")),
        Dense(2 * WIDTH, 24, activation_function=torch.nn.Tanh()),
        Normalize(),
        Dense(24, 24, bias=False, activation_function=torch.nn.GELU(), use_residual=True),
        Dense(24, 16, activation_function=torch.nn.Identity(), use_residual=True),
        Normalize(),
    )
    wanted = expected(saved(base, tmp_path / "model", *modules))
    source = opened(tmp_path / "model")
    got = answer_of_graph(source, tmp_path, TEXTS)
    assert least_cosine(got, wanted) >= 0.9999
    assert (source.size, source.task.normalize, source.max_tokens) == (16, True, LIMIT)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_vector_is_the_librarys_when_texts_are_lower_cased_cut_and_shortened(base: Path, tmp_path: Path) -> None:
    """What the folder's own files say beside the modules; MiniLM's tokeniser is made to tell cases apart."""
    cased = tmp_path / "cased"
    shutil.copytree(base, cased)
    text = (base / "tokenizer.json").read_text(encoding="utf-8")
    (cased / "tokenizer.json").write_text(
        text.replace('"lowercase":true', '"lowercase":false').replace('"lowercase": true', '"lowercase": false')
    )
    (cased / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}')
    SentenceTransformer(modules=[Transformer(str(cased)), Pooling(WIDTH)], device="cpu", truncate_dim=20).save(
        str(tmp_path / "model")
    )
    # The library of today saves neither key any more; folders of earlier ones have both.
    own = tmp_path / "model" / "sentence_bert_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"max_seq_length": 9, "do_lower_case": True}))
    pipeline = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    source = opened(tmp_path / "model")
    assert (source.lower_case, source.max_tokens, source.size) == (True, 9, 20)
    got = answer_of_torch(source, tmp_path, [text.upper() for text in TEXTS])
    wanted = pipeline.encode([text.upper() for text in TEXTS], show_progress_bar=False)
    assert least_cosine(got, wanted) >= 0.9999
    raw = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert raw.encode("MOON").ids != raw.encode("moon").ids, "without lower-casing, case would matter"


def test_transformer_in_a_folder_of_its_own_is_found(base: Path, tmp_path: Path) -> None:
    pipeline = saved(base, tmp_path / "model", Pooling(WIDTH))
    inner = tmp_path / "model" / "0_Transformer"
    inner.mkdir()
    for path in (tmp_path / "model").iterdir():
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    modules = tmp_path / "model" / "modules.json"
    modules.write_text(modules.read_text().replace('"path": ""', '"path": "0_Transformer"'))
    source = opened(tmp_path / "model")
    assert (source.folder, source.transformer) == (tmp_path / "model", inner)
    assert least_cosine(answer_of_torch(source, tmp_path, TEXTS), expected(pipeline)) >= 0.9999


def test_graph_scores_as_the_library_when_folder_is_a_cross_encoders(base: Path, tmp_path: Path) -> None:
    CrossEncoder(str(base), device="cpu", max_length=LIMIT).save_pretrained(str(tmp_path / "model"))
    library = CrossEncoder(str(tmp_path / "model"), device="cpu", local_files_only=True)
    source = opened(tmp_path / "model")
    assert (source.task.name, source.task.activation, source.task.segment) == ("reranking", "sigmoid", True)
    got = answer_of_graph(source, tmp_path, PAIRS)[:, 0]
    wanted = library.predict(PAIRS, show_progress_bar=False)
    assert wanted.std() > 1e-3
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize(("labels", "activation"), [(3, None), (1, torch.nn.Identity()), (3, torch.nn.Sigmoid())])
def test_scores_are_the_librarys_when_activation_is(labels: int, activation: Any, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    if labels != 1:
        from transformers import AutoModelForSequenceClassification

        AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=labels, ignore_mismatched_sizes=True
        ).save_pretrained(folder)
    CrossEncoder(str(folder), device="cpu", activation_fn=activation).save_pretrained(str(tmp_path / "model"))
    library = CrossEncoder(str(tmp_path / "model"), device="cpu", local_files_only=True)
    source = opened(tmp_path / "model")
    got = answer_of_torch(source, tmp_path, PAIRS)
    wanted = library.predict(PAIRS, show_progress_bar=False).reshape(len(PAIRS), -1)
    assert got.shape == (len(PAIRS), labels)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
