"""Each family's tiny model, written, exported and fused once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from builders.export import export_onnx
from builders.fuse import FuseReport, fuse
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from tests.families.models import LIMIT, save_model


@dataclass(frozen=True)
class Made:
    """A model from its folder to its fused graph."""

    folder: Path
    source: EncoderSource
    graph: ir.Model
    fused: ir.Model
    report: FuseReport


@pytest.fixture(scope="session")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Make a family's model with one of the heads and a changed config; what was made is kept for the session."""
    kept: dict[tuple[Any, ...], Made] = {}

    def get(family: str, auto_class: str = "AutoModel", **options: Any) -> Made:
        key = (family, auto_class, *sorted(options.items()))
        if key not in kept:
            folder = save_model(family, tmp_path_factory.mktemp(family), auto_class=auto_class, **options)
            source = open_source(ModelSettings(source=str(folder)))
            graph = ir.load(export_onnx(source, folder / "model.onnx").path)
            kept[key] = Made(folder, source, graph, *_fused(graph, source))
        return kept[key]

    return get


def _fused(graph: ir.Model, source: EncoderSource) -> tuple[ir.Model, FuseReport]:
    copy = graph.clone()
    traits = source.architecture.traits | ({"token_head"} if source.task.per_token else set())
    report = fuse(copy, family=source.family, layers=source.layers, traits=traits, max_length=LIMIT)
    return copy, report
