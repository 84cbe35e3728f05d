"""Small random models for the kinds of faults that users of such systems reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from builders.export import export_onnx
from builders.graph_file import load_graph
from builders.samples import write_sample
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.verify.runner import OUTPUT, Floats, Ids, OnnxRunner


@dataclass(frozen=True)
class Sample:
    """A random model of 512 usable positions, exported."""

    source: EncoderSource
    path: Path

    @property
    def graph(self) -> onnx_ir.Model:
        return load_graph(self.path)

    @property
    def tokenizer(self) -> Path:
        return self.source.transformer / "tokenizer.json"

    def tokenise(self, *texts: str, **options: bool) -> list[Ids]:
        return [tokens.ids for tokens in Tokeniser(self.tokenizer, 512, **options)(texts)]

    def run(self, *rows: Ids, width: int | None = None) -> Floats:
        """One padded batch."""
        width = width or max(len(row) for row in rows)
        ids = np.full((len(rows), width), 9, dtype=np.int32)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        length = np.array([[len(row)] for row in rows], dtype=np.int32)
        return np.asarray(OnnxRunner(self.graph, threads=1).run(ids, length)[OUTPUT])


def sample(folder: Path, family: str) -> Sample:
    write_sample(folder, family, "embedding", positions=512)
    source = open_source(ModelSettings(source=str(folder)))
    return Sample(source, export_onnx(source, folder / "model.onnx").path)


@pytest.fixture(scope="session")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample(tmp_path_factory.mktemp("roberta"), "roberta")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample(tmp_path_factory.mktemp("bert"), "bert")
