"""How large the loads are where the command line does not say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders.bench import rounds
from builders.bench.load import full_load
from builders.bench.rounds import cores, own_processes
from builders.cli import app
from builders.settings import load_settings
from tests.tools.repositories import ROOT


def test_each_process_of_a_gpu_server_has_two_batches_at_full_load() -> None:
    assert full_load(load_settings(ROOT / "deploy.cpu.yaml")) == 32
    gpu = load_settings(ROOT / "deploy.yaml")
    assert full_load(gpu) == 2 * gpu.entry.processes * gpu.entry.batch == 512
    assert full_load(gpu, 64) == 1024


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 8)])
def test_the_generator_takes_a_quarter_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, processes: int
) -> None:
    monkeypatch.setattr(rounds, "_CPU_QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert own_processes(1000) == processes


@pytest.mark.parametrize(("quota", "expected"), [("max 100000\n", 16), ("250000 100000\n", 3), ("50000 100000\n", 1)])
def test_a_container_has_as_many_cores_as_its_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(rounds, "_CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    assert cores() == expected


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_few_clients_have_few_processes_however_many_cores_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    # The folder of the results cannot be made, which is the next thing that is looked at.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    options = ["--config", str(ROOT / "deploy.cpu.yaml"), "--clients", "2", "--output", str(tmp_path / "file" / "out")]
    ended = CliRunner().invoke(app, [command, *options])
    assert ended.exit_code != 0
    assert "clients of the closed loop" not in ended.output
