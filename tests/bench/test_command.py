"""`python -m builders bench`: its exit status and what it leaves. The server is one in this process."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders.bench import command, rounds
from builders.cli import app
from clients.load import selftest
from tests.bench.servers import FakeDriver
from tests.tools.repositories import settings_file


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
    result = CliRunner().invoke(app, ["bench", "--config", str(config), *size, "--output", str(output), *options])
    return result.exit_code, result.output, output


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


def test_options_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    # A BuilderError: `python -m builders` prints it as one line and exits with 2.
    result = CliRunner().invoke(app, ["bench", "--mix", "nonsense", "--output", str(tmp_path)])
    assert "mix of lengths cannot be read" in str(result.exception)
    result = CliRunner().invoke(app, ["bench", "--against", str(tmp_path / "none.json")])
    assert "no readable result" in str(result.exception)
    result = CliRunner().invoke(app, ["bench", "--no-naive", "--peer-venv", str(tmp_path), "--output", str(tmp_path)])
    assert "holds no peer" in str(result.exception)
