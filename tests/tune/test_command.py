"""`python -m builders tune`: its exit status and what it writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders.bench import rounds
from builders.bench.product import Variant, overridden
from builders.bench.result import Row
from builders.cli import app
from builders.settings import load_settings
from builders.tune import command
from clients.load import run
from tests.bench.servers import FakeDriver
from tests.tools.repositories import CACHE, ROOT, settings_file
from tests.tools.tiny import tiny_model
from tests.tune.rows import row

SIZE = ["--rounds", "2", "--seconds", "0.2", "--closed-seconds", "0.2", "--clients", "4", "--noise", "10"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers in this process: each text takes as many milliseconds as the window has."""

    def driver(setup: Any, label: str, overrides: Any) -> FakeDriver:
        settings = overridden(setup.settings, Variant(label, "", overrides), setup.work)
        return FakeDriver(label, settings.entry.window_ms / 1000)

    monkeypatch.setattr(command, "_driver", driver)
    monkeypatch.setattr(rounds, "gentle", lambda plan: rounds.Plan(plan.requests[:1], 0.01, plan.exact))
    monkeypatch.setattr(run, "_LEAD_S", 0.02)
    # This machine may be busy: what is tested is what the command does with its figures.
    monkeypatch.setattr(rounds, "summarise", partial(rounds.summarise, late_limit_ms=1e6))


def tune(folder: Path, *options: str, p99_ms: float = 60_000, **overrides: Any) -> tuple[int, str, Path]:
    objectives = {"rate": 20, "p99_ms": p99_ms, "gpu_utilization": None}
    config = settings_file(folder, "deploy.cpu.yaml", objectives=objectives, **overrides)
    config.write_text(f"# my own words\n{config.read_text()}")
    arguments = ["tune", "--config", str(config), "--cache", str(CACHE), "--output", str(folder / "out"), *options]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output, config


@pytest.mark.usefixtures("fake")
def test_best_setting_is_printed_stored_and_applied(tmp_path: Path) -> None:
    entry = {"window_ms": 100.0, "batch": 32}
    options = ["--only", "window", "--grid", "20/16", "--apply", *SIZE]
    code, printed, config = tune(tmp_path, *options, entry=entry)
    assert code == 0, printed
    assert "entry.window_ms: 20.0 (was 100.0)" in printed
    assert "EncoderClient(url, batch=16)" in printed
    stored = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert [one["label"] for one in stored["axes"][0]["settings"]] == ["100 ms / 32", "20 ms / 16"]
    assert stored["changes"]["entry.batch"] == {"from": 32, "to": 16}
    assert stored["exit_status"] == 0
    settings = load_settings(config)
    assert (settings.entry.window_ms, settings.entry.batch) == (20.0, 16)
    assert config.read_text().startswith("# my own words\n")
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 2 * 2, "two settings and the first again, two rounds, two loops"


@pytest.mark.parametrize(
    ("rate", "p99_ms", "gpu", "batches", "expected"),
    [
        (40.0, 2000.0, None, (16, 32, 64), 80),  # 40 a second for 2 s each
        (40.0, 100.0, None, (16, 32, 64), 64),  # fewer could not fill two of the file's batches
        (500.0, 2000.0, None, (16, 32, 64), 128),  # more would fill no batch better
        (40.0, 2000.0, None, (), 64),  # the window is not swept: no batch but the file's own
        (40.0, 2000.0, 0.7, (16, 32, 64), 80),  # an objective for a GPU that is not there
        (0.3, 10.0, None, (), 64),
    ],
)
def test_as_many_clients_as_the_objective_lets_wait_within_what_batches_need(
    tmp_path: Path, rate: float, p99_ms: float, gpu: float | None, batches: tuple[int, ...], expected: int
) -> None:
    objectives = {"rate": 7, "p99_ms": p99_ms, "gpu_utilization": gpu}
    settings = load_settings(settings_file(tmp_path, "deploy.cpu.yaml", objectives=objectives, entry={"batch": 32}))
    assert command.default_clients(settings, rate, batches)[0] == expected


def test_each_process_has_two_of_the_largest_batches_when_a_gpu_computes() -> None:
    settings = load_settings(ROOT / "deploy.yaml")
    assert (settings.engine.kind, settings.entry.processes) == ("tensorrt", 8)
    assert command.default_clients(settings, 100.0, (16, 64))[0] == 2 * 8 * 64


@pytest.mark.parametrize(
    ("options", "clients", "words"),
    [([], 64, "two of the file's batches (64)"), (["--clients", "5"], 5, "as --clients says")],
)
def test_the_number_of_clients_is_printed_and_stored_with_its_reason(
    tmp_path: Path, options: list[str], clients: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(self: Any, label: str, overrides: Any, round_: int) -> tuple[Row, Row]:
        return row("closed", round_, 100, 50, 90), row("open", round_, 20, 50, 90)

    monkeypatch.setattr(command._Turns, "__call__", measured)
    monkeypatch.setattr(run, "Crew", lambda processes: nullcontext())
    code, printed, _ = tune(tmp_path, "--only", "window", "--grid", "20/16", *options, p99_ms=100)
    assert code == 0, printed
    assert f"{clients} clients in the closed loop: " in printed
    assert words in printed
    assert json.loads((tmp_path / "out" / "tune.json").read_text())["load"]["clients"] == clients


@pytest.mark.parametrize(("p99_ms", "slower", "expected"), [(1.0, 1.0, 1), (60_000.0, 1.3, 3), (60_000.0, 1.0, 0)])
def test_nothing_is_applied_past_the_line_or_when_noisy(
    tmp_path: Path, p99_ms: float, slower: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(self: Any, label: str, overrides: Any, round_: int) -> tuple[Row, Row]:
        cost = 0.5 if "20 ms" in label else slower if "once more" in label else 1.0
        return row("closed", round_, 100 / cost, 50 * cost, 90 * cost), row("open", round_, 20, 50 * cost, 90 * cost)

    monkeypatch.setattr(command._Turns, "__call__", measured)
    monkeypatch.setattr(run, "Crew", lambda processes: nullcontext())
    options = ["--only", "window", "--grid", "20/16", "--apply"]
    code, printed, config = tune(tmp_path, *options, p99_ms=p99_ms, entry={"window_ms": 100.0, "batch": 32})
    assert code == expected, printed
    assert {0: "better", 1: "no setting keeps the stop line", 3: "too noisy"}[expected] in printed
    assert load_settings(config).entry.window_ms == (20.0 if expected == 0 else 100.0)


def test_apply_that_could_not_be_done_is_refused_before_the_load(tmp_path: Path) -> None:
    """Of a model that another file lists."""
    below = settings_file(tmp_path, "deploy.cpu.yaml", models=[{"name": "a", "model": {"source": "package:x/y"}}])
    config = tmp_path / "own.yaml"
    config.write_text(f"extends: {below.name}\nentry: {{processes: 2}}\n")
    ended = CliRunner().invoke(app, ["tune", "--config", str(config), "--model", "a", "--apply"])
    assert "not listed in this settings file itself" in str(ended.exception)


def test_options_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for options, words in (
        (["--only", "nothing"], "no such axis"),
        (["--grid", "5-16"], "grid cannot be read"),
        (["--mix", "nonsense"], "mix of lengths cannot be read"),
        (["--texts", str(tmp_path / "none.txt")], "corpus cannot be read"),
    ):
        result = CliRunner().invoke(app, ["tune", *options])
        assert words in str(result.exception)


@pytest.mark.slow
def test_real_sweep_of_a_tiny_model_with_edges_of_its_own_texts(tmp_path: Path) -> None:
    """Only that it runs to its end and says what it found: figures of a busy machine are no matter of a test."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(["a few short words"] * 40 + ["many more words than that " * 5] * 10))
    overrides = {
        "model": {"source": str(tiny_model(tmp_path / "model", "embedding")), "max_tokens": None},
        "buckets": [32, 64],
        "entry": {"processes": 1},
    }
    only = ["--only", "window", "--only", "buckets", "--grid", "10/32,5/64", "--texts", str(texts)]
    size = ["--rounds", "2", "--seconds", "2", "--closed-seconds", "1", "--clients", "4", "--rate", "20"]
    code, printed, _ = tune(tmp_path, *only, *size, "--bucket-count", "2", **overrides)
    assert code in (0, 3), printed
    stored = json.loads((tmp_path / "out" / "tune.json").read_text())
    labels = {axis["name"]: [one["label"] for one in axis["settings"]] for axis in stored["axes"]}
    assert labels == {"window": ["10 ms / 32", "5 ms / 64"], "buckets": ["32, 64", "8, 64"]}
    assert all(one["throughput"] > 0 for axis in stored["axes"] for one in axis["settings"])
