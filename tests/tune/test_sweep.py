"""The order of a sweep, what it stops, what it chooses and when it gives no verdict; figures are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.product import Variant, overridden
from builders.bench.result import Row
from builders.errors import ServerError
from builders.settings import DeploySettings, load_settings
from builders.tune.axis import buckets_axis, parse_grid, processes_axis, threads_axis, window_axis
from builders.tune.outcome import Outcome, axis_grid, changed, judge_sweep
from builders.tune.sweep import Sweep, SweepSpec, run_sweep
from tests.tools.repositories import ROOT
from tests.tune.rows import row

SETTINGS = load_settings(ROOT / "deploy.cpu.yaml")
CELLS = parse_grid("5/16, 10/32, 20/64, 30/64")
Figures = Callable[[DeploySettings], tuple[float, float, float]]


def checked(label: str, overrides: Mapping[str, Any]) -> DeploySettings:
    return overridden(SETTINGS, Variant(label, "", overrides), Path("work"))


class Measured:
    """Throughput, P50 and P99 of settings, of which `log` tells the order."""

    def __init__(self, figures: Figures, drift: Callable[[int], float] = lambda turn: 1.0):
        self.figures, self.drift, self.log = figures, drift, list[str]()

    def __call__(self, label: str, overrides: Mapping[str, Any], round_: int) -> tuple[Row, Row | None]:
        throughput, p50, p99 = self.figures(checked(label, overrides))
        slow = self.drift(len(self.log))
        self.log.append(label)
        closed = row("closed", round_, throughput / slow, p50, p99)
        return closed, row("open", round_, throughput / slow, p50 * slow, p99 * slow)


def by_window_and_processes(settings: DeploySettings) -> tuple[float, float, float]:
    throughput, p50, p99 = {
        5: (100.0, 180.0, 320.0), 10: (145.0, 210.0, 370.0), 20: (178.0, 280.0, 520.0), 30: (182.0, 350.0, 680.0)
    }[int(settings.entry.window_ms)]  # fmt: skip
    gain = {1: 0.7, 2: 1.0, 4: 1.2, 8: 1.0}[settings.entry.processes]
    return throughput * gain, p50, p99


def sweep(measure: Measured, said: list[str] | None = None, limit_ms: float = 400, cores: int = 4) -> Sweep:
    axes = [partial(window_axis, cells=CELLS), partial(processes_axis, cores=cores)]
    say = (said if said is not None else []).append
    return run_sweep(SETTINGS, axes, checked, measure, SweepSpec(3, limit_ms), say)  # type: ignore[arg-type]


def judged(done: Sweep, limit_ms: float = 400, rate: float = 40) -> Outcome:
    objectives = SETTINGS.objectives.model_copy(update={"p99_ms": limit_ms, "gpu_utilization": None})
    settings = SETTINGS.model_copy(update={"objectives": objectives})
    return judge_sweep(done, settings, LoadSpec(rate=rate), Path("deploy.yaml"), 0.10)


def test_each_axis_starts_from_the_best_so_far_and_ends_with_the_first_row_again() -> None:
    measure, said = Measured(by_window_and_processes), list[str]()
    done = sweep(measure, said)
    assert [one.chosen.setting.label for one in done.swept] == ["10 ms / 32", "4 processes"]
    assert changed(SETTINGS, done.overrides) == {"entry.processes": (2, 4)}
    assert measure.log[-3:] == ["as the file says, once more"] * 3
    # Interleaved: a round of all before the next round of any.
    assert sorted(measure.log[:4]) == sorted(measure.log[4:8])
    assert measure.log[0] != measure.log[4]
    outcome = judged(done)
    assert (outcome.code, outcome.noise) == (0, ())
    assert outcome.verdict == "better: entry.processes: 4 (was 2)"


def test_clearly_worse_setting_is_stopped_and_says_so_in_the_table() -> None:
    measure, said = Measured(by_window_and_processes), list[str]()
    done = sweep(measure, said)
    assert [trial.rounds for trial in done.swept[0].trials] == [3, 2, 2, 2]
    assert measure.log.count("window / batch 30 ms / 64") == 2
    grid = axis_grid(done.swept[0], LoadSpec(), 400)
    assert [cells[0] for cells in grid.rows] == ["10 ms / 32", "5 ms / 16", "20 ms / 64", "30 ms / 64"]
    assert grid.rows[0][3] == "base"
    assert [float(cells[3].removesuffix(" %")) for cells in grid.rows[1:]] == pytest.approx([-31, 23, 26], abs=3)
    assert [cells[5] for cells in grid.rows] == ["keeps", "keeps", "past", "past"]
    assert grid.rows[0][-1] == "chosen"
    assert grid.rows[3][-1] == "stopped after round 2: clearly past the stop line"
    assert any("20 ms / 64 is stopped after round 2" in line for line in said)


def test_setting_whose_server_does_not_start_is_left_out_and_the_first_one_s_is_an_error() -> None:
    class Failing(Measured):
        def __call__(self, label: str, overrides: Mapping[str, Any], round_: int) -> tuple[Row, Row | None]:
            if self.failing in label:
                raise ServerError("shared memory is too small", value=label)
            return super().__call__(label, overrides, round_)

    measure, said = Failing(by_window_and_processes), list[str]()
    measure.failing = "4 processes"  # type: ignore[attr-defined]
    done = sweep(measure, said)
    trials = {trial.setting.label: trial for trial in done.swept[1].trials}
    assert trials["4 processes"].rounds == 0
    assert done.swept[1].chosen.setting.label == "2 processes"
    cells = next(row for row in axis_grid(done.swept[1], LoadSpec(), 400).rows if row[0] == "4 processes")
    assert cells[1:] == (
        "–",
        "over",
        "–",
        "–",
        "past",
        "stopped after round 0: did not run: shared memory is too small",
    )
    assert any("4 processes is left out: shared memory" in line for line in said)
    measure.failing = "10 ms / 32"  # type: ignore[attr-defined]
    with pytest.raises(ServerError, match="shared memory"):
        sweep(measure)


def test_rate_above_the_objective_s_that_is_not_reached_proves_nothing() -> None:
    done = sweep(Measured(by_window_and_processes))
    done.best.opened.pop()
    assert [judged(done, rate=rate).code for rate in (40, 50)] == [1, 3]


def test_machine_that_slowed_down_gives_no_verdict() -> None:
    done = sweep(Measured(by_window_and_processes, drift=lambda turn: 1.0 if turn < 12 else 1.3))
    outcome = judged(done)
    assert outcome.code == 3
    assert "too noisy" in outcome.verdict
    assert outcome.spread == pytest.approx(0.3, abs=0.05)
    assert "the first row measured again differs by 3" in outcome.verdict


def test_late_generator_gives_no_verdict() -> None:
    done = sweep(Measured(by_window_and_processes))
    done.best.opened[0] = replace(done.best.opened[0], valid=False)
    outcome = judged(done)
    assert (outcome.code, "generator was late" in outcome.verdict) == (3, True)


def test_rate_below_the_objective_gives_no_verdict() -> None:
    assert judged(sweep(Measured(by_window_and_processes)), rate=10).code == 3


def test_past_the_line_fails_whatever_was_gained() -> None:
    outcome = judged(sweep(Measured(by_window_and_processes), limit_ms=100), limit_ms=100)
    assert outcome.code == 1
    assert "no setting keeps the stop line" in outcome.verdict


def test_settings_that_cannot_work_are_left_out_and_said() -> None:
    said: list[str] = []
    axes = [partial(window_axis, cells=((5.0, 16), (3000.0, 32)))]
    done = run_sweep(SETTINGS, axes, checked, Measured(by_window_and_processes), SweepSpec(2, 400), said.append)
    assert [trial.setting.label for trial in done.swept[0].trials] == ["10 ms / 32", "5 ms / 16"]
    assert any("left out" in line and "timeout_ms" in line for line in said)
    with pytest.raises(BenchError, match="nothing to sweep"):
        run_sweep(SETTINGS, [lambda now: None], checked, Measured(by_window_and_processes), SweepSpec(2, 400), print)


def test_axes_hold_what_the_settings_and_the_machine_allow() -> None:
    labels = [setting.label for setting in processes_axis(SETTINGS, 8).settings]
    assert labels == ["2 processes", "1 process", "4 processes", "8 processes", "16 processes"]
    assert len(processes_axis(SETTINGS, 1).settings) == 2
    threads = threads_axis(SETTINGS, 2)
    assert threads is not None
    assert [setting.label for setting in threads.settings] == ["1 a lane", "2 a lane"]
    assert threads_axis(load_settings(ROOT / "deploy.yaml"), 8) is None
    wide = window_axis(SETTINGS, [(10, 128)]).settings[1]
    assert checked("wide", wide.overrides).lanes.long.bound == 128
    used = (16, 32, 64, 128, 256, 512)
    buckets = buckets_axis(SETTINGS, used, [(24, 104, 512), used])
    assert [dict(setting.overrides) for setting in buckets.settings] == [{}, {"buckets": (24, 104, 512)}]


def test_grid_that_cannot_be_read_is_refused() -> None:
    for wrong in ("", "5", "5/0", "5/16; 10/32", "-1/16"):
        with pytest.raises(BenchError, match="grid cannot be read"):
            parse_grid(wrong)
