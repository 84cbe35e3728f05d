"""The choice in the settings file: values changed, everything else as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from builders.bench.driver import BenchError
from builders.settings import load_settings
from builders.tune.apply import apply_changes
from tests.tools.repositories import ROOT

CHANGES = {
    "entry.window_ms": 20.0, "entry.batch": 64, "entry.processes": 4, "lanes.short.threads": 2, "buckets": (24, 512),
}  # fmt: skip


BELOW = """\
model: {source: "package:x/y", max_tokens: 512}   # what is below
buckets: [128, 512]
entry: {processes: 8}
"""
OWN = """\
# What a machine without GPU needs.
extends: deploy.yaml

# Finer ones.
buckets: [16, 32, 64, 512]   # tokens

lanes:
  # They leave late.
  short: {batch: 8, late_from: 64}
  long: {batch: 4, nice: 19}

entry:
  processes: 2   # of two cores
  interactive: {timeout_ms: 2000, queue_size: 1024}

engine: {kind: onnxruntime, precision: fp32, max_batch: 8, max_batch_tokens: 2048, batch_steps: [1, 2, 4, 8]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deploy.yaml").write_text(BELOW)
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path


def test_values_change_and_every_other_line_and_comment_stays(folder: Path) -> None:
    apply_changes(folder / "own.yaml", CHANGES)
    settings = load_settings(folder / "own.yaml")
    assert (settings.entry.window_ms, settings.entry.batch, settings.entry.processes) == (20.0, 64, 4)
    assert (settings.lanes.short.threads, settings.lanes.short.late_from) == (2, 64)
    assert settings.buckets == (24, 512)
    lines, before = (folder / "own.yaml").read_text().splitlines(), OWN.splitlines()
    assert [line for line in before if line not in lines] == [
        "buckets: [16, 32, 64, 512]   # tokens",
        "  short: {batch: 8, late_from: 64}",
        "  processes: 2   # of two cores",
    ]
    assert sum(line.count("#") for line in lines) == sum(line.count("#") for line in before)
    assert (folder / "deploy.yaml").read_text() == BELOW
    assert sorted(path.name for path in folder.iterdir()) == ["deploy.yaml", "own.yaml"]


@pytest.mark.parametrize("name", ["deploy.yaml", "deploy.cpu.yaml", "deploy.long.cpu.yaml"])
def test_applying_what_is_there_changes_no_line_of_this_projects_files(tmp_path: Path, name: str) -> None:
    for path in ROOT.glob("deploy*.yaml"):
        shutil.copy(path, tmp_path)
    processes = load_settings(tmp_path / name).entry.processes
    apply_changes(tmp_path / name, {"entry.processes": processes})
    after, before = (tmp_path / name).read_text().splitlines(), (ROOT / name).read_text().splitlines()
    assert set(before) <= set(after)


LISTED = """\
extends: deploy.yaml
models:
  - name: first   # the one
    model: {source: "package:x/y"}
    entry: {processes: 2}
  # the other
  - name: second
    model: {source: "package:x/z"}
"""


def test_values_of_one_of_several_models_go_to_its_item(folder: Path) -> None:
    config = folder / "two.yaml"
    config.write_text(LISTED)
    apply_changes(config, {"entry.processes": 4, "entry.batch": 64}, "second")
    assert config.read_text() == LISTED + "    entry:\n      processes: 4\n      batch: 64\n"
    assert [load_settings(config, name).entry.processes for name in ("first", "second")] == [2, 4]
    with pytest.raises(BenchError, match="not listed in this settings file"):
        apply_changes(config, {"entry.processes": 4}, "third")


def test_file_is_left_alone_when_the_result_would_not_read_as_intended(folder: Path) -> None:
    config = folder / "shared.yaml"
    config.write_text(
        'extends: deploy.yaml\nmodels:\n- {name: a, model: {source: "package:x/y"}, entry: &e {processes: 2}}\n'
        '- {name: b, model: {source: "package:x/y"}, entry: *e}\n'
    )
    before = config.read_bytes()
    with pytest.raises(BenchError, match="left as it was"):
        apply_changes(config, {"entry.processes": 4}, "b")
    assert config.read_bytes() == before
    assert not list(folder.glob(".*"))
