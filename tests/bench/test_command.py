"""`python -m builders bench`: its exit status and what it leaves. The server is one in this process."""

import fcntl
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders.bench import command, rounds, session
from builders.bench.driver import BenchError
from builders.bench.ladder import Rung
from builders.bench.load import LoadSpec
from builders.bench.product import Variant
from builders.bench.session import Session
from builders.cli import app
from builders.settings import load_settings
from clients.load import selftest
from clients.load.selftest import Floor
from tests.bench.servers import FakeDriver, result
from tests.tools.repositories import settings_file

FLOOR = Floor(rate=50, p50_ms=1, p99_ms=2, late_p99_ms=1, max_rate=120, processes=1)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be busy: what is tested is what the bench does with its figures."""
    monkeypatch.setattr(command, "_drivers", lambda *_: [FakeDriver("naive", 0.05), FakeDriver("product", 0.01)])
    monkeypatch.setattr(rounds, "machine_speed", lambda: 1000.0)
    monkeypatch.setattr(rounds, "summarise", partial(rounds.summarise, late_limit_ms=1e6))
    monkeypatch.setattr(selftest.measure_floor, "__kwdefaults__", {"rate": 50.0, "seconds": 0.2, "clients": 4})


def bench(folder: Path, p99_ms: float, *options: str, gpu: float | None = None) -> tuple[int, str, Path]:
    objectives = {"rate": 20, "p99_ms": p99_ms, "gpu_utilization": gpu}
    config, output = settings_file(folder, "deploy.cpu.yaml", objectives=objectives), folder / "out"
    size = ["--rounds", "1", "--seconds", "1", "--closed-seconds", "1", "--clients", "4", "--no-ladder"]
    ended = CliRunner().invoke(app, ["bench", "--config", str(config), *size, "--output", str(output), *options])
    return ended.exit_code, ended.output, output


@pytest.mark.usefixtures("steady")
def test_past_the_stop_line_the_bench_fails_and_leaves_its_results_all_the_same(tmp_path: Path) -> None:
    code, printed, output = bench(tmp_path, 1.0)
    assert code == 1, printed
    assert "P99 at 20 texts/s at most 1 ms" in printed
    assert "passed over" in printed
    assert "the generator itself" in printed
    stored = json.loads((output / "result.json").read_text())
    assert list(stored["drivers"]) == ["naive", "product"]
    assert {path.name for path in output.glob("*.png")} == {"part1_latency_cdf.png", "part1_throughput.png"}
    assert "side by side" in (output / "report.html").read_text()
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    assert [(row["driver"], row["loop"]) for row in rows] == [
        (name, loop) for name in ("naive", "product") for loop in ("closed", "open")
    ]
    assert stored["settings"]["entry"]["batch"] == 32
    assert "MiniLM" in stored["model"]


@pytest.mark.usefixtures("steady")
def test_within_the_line_it_passes_and_is_compared_with_a_stored_run(tmp_path: Path) -> None:
    code, printed, output = bench(tmp_path, 60_000)
    assert code == 0, printed
    stored = json.loads((output / "result.json").read_text())
    for row in stored["rows"]:  # as if the product had been three times as fast then
        row["latencies"] = [value / 3 for value in row["latencies"]]
    (tmp_path / "stored.json").write_text(json.dumps(stored))
    code, printed, _ = bench(tmp_path, 60_000, "--against", str(tmp_path / "stored.json"))
    assert code == 1, printed
    assert "slower" in printed


def test_verdict_and_report_are_there_when_the_table_of_techniques_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BenchError("a row's server did not start")

    monkeypatch.setattr(command, "_drivers", lambda *_: [])
    monkeypatch.setattr(command, "_measured", lambda *_, **__: (result(), []))
    monkeypatch.setattr(command, "_ladder", broken)
    monkeypatch.setattr(selftest, "measure_floor", lambda processes: FLOOR)
    config, output = settings_file(tmp_path, "deploy.cpu.yaml"), tmp_path / "out"
    ended = CliRunner().invoke(app, ["bench", "--config", str(config), "--output", str(output)])
    assert "did not start" in str(ended.exception)
    for place in (ended.output, (output / "report.html").read_text()):
        assert "P99 at 40 texts/s at most 2000 ms" in place
        assert "held" in place


def test_generator_near_its_own_maximum_and_a_busy_machine_are_said() -> None:
    assert command._doubts(result(), replace(FLOOR, max_rate=1000), 0.05) == []
    near, busy = command._doubts(result(), FLOOR, 0.4)[::-1]
    assert "product" in near
    assert "the 120 that the load generator can do" in near
    assert "40 % of the machine were taken" in busy


def test_servers_keep_the_logs_of_their_failures_in_the_run_s_folder(tmp_path: Path) -> None:
    config, venv = settings_file(tmp_path, "deploy.cpu.yaml"), tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("litserve", "python"):
        (venv / "bin" / name).write_text("#!/bin/sh\n")
        (venv / "bin" / name).chmod(0o755)
    settings = load_settings(config)
    setup = Session.opened("bench", settings, LoadSpec(), config, cache=None, output=tmp_path / "out")
    naive, own, peer = command._drivers(setup, (venv,), (4,), True)
    rung = command.rung_driver(setup, Rung(Variant("+ a row", ""), False, False), tmp_path)
    found = [naive._child._wanted_log, own._log, peer._child._wanted_log, rung._log]  # type: ignore[attr-defined]
    assert found == [tmp_path / "out" / f"{name}.log" for name in ("naive", "product", "LitServe_b4", "__a_row")]


def test_two_at_once_a_folder_that_cannot_be_written_and_missing_packages_are_refused_before_any_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_drivers", lambda *_: [FakeDriver("product")])
    monkeypatch.setattr(rounds, "run_rounds", lambda *_: pytest.fail("load"))
    config = settings_file(tmp_path, "deploy.cpu.yaml")

    def refused(*options: str) -> str:
        return str(CliRunner().invoke(app, ["bench", "--config", str(config), *options]).exception)

    (tmp_path / "build").mkdir()
    with (tmp_path / "build" / ".measuring.lock").open("w") as file:
        file.write("77\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another bench or tune" in refused()
        assert "'process 77'" in refused()
    (tmp_path / "taken").write_text("a file, no folder")
    assert "taken" in refused("--output", str(tmp_path / "taken"))
    monkeypatch.setattr(session, "_is_there", lambda name: name != "matplotlib")
    assert "['matplotlib']" in refused()


def test_options_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    # A BuilderError: `python -m builders` prints it as one line and exits with 2.
    ended = CliRunner().invoke(app, ["bench", "--mix", "nonsense", "--output", str(tmp_path)])
    assert "mix of lengths cannot be read" in str(ended.exception)
    ended = CliRunner().invoke(app, ["bench", "--against", str(tmp_path / "none.json")])
    assert "no readable result" in str(ended.exception)
    ended = CliRunner().invoke(app, ["bench", "--against", str(tmp_path), "--paired", str(tmp_path)])
    assert "two comparisons" in str(ended.exception)
    ended = CliRunner().invoke(app, ["bench", "--no-naive", "--peer-venv", str(tmp_path), "--output", str(tmp_path)])
    assert "holds no peer" in str(ended.exception)
