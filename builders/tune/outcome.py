"""What a sweep leaves: the choice, whether it may be believed, whether it holds the stop line; JSON and tables."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builders.bench.load import LoadSpec
from builders.bench.result import BenchResult, this_machine_in_words
from builders.bench.stopline import LineCheck, check_line
from builders.settings import DeploySettings
from builders.tune.sweep import Overrides, Sweep, Swept
from builders.tune.trial import Trial, spread_of, throughput_ratio
from clients.load.page import Grid
from clients.load.report import milliseconds, plain_json

_FORMAT = 1
HELD, PAST, NO_VERDICT = 0, 1, 3


@dataclass(frozen=True)
class Outcome:
    """The verdict of a tuning run.

    Attributes:
        changes: dotted name of each setting that should change -> (the file's value, the chosen one).
        spread: between the first row and its repeat, share of 1.
        noise: why the figures are not to be believed; empty when they are.
        checks: the objectives, held by the choice or not.
        code: exit status: 0 held, 1 past the stop line, 3 no verdict.
    """

    changes: Mapping[str, tuple[Any, Any]]
    spread: float
    noise: tuple[str, ...]
    checks: tuple[LineCheck, ...]
    code: int

    @property
    def verdict(self) -> str:
        """One line."""
        if self.noise:
            return "too noisy: nothing is chosen, nothing is written; " + "; ".join(self.noise)
        if self.code == PAST:
            return "no setting keeps the stop line; nothing is written"
        if self.code == NO_VERDICT:
            return "the stop line was not judged; nothing is written"
        if not self.changes:
            return "the file's own settings are as good as any that were tried"
        return "better: " + ", ".join(f"{name}: {_plain(new)} (was {_plain(old)})" for name, (old, new) in self.items)

    @property
    def items(self) -> list[tuple[str, tuple[Any, Any]]]:
        """The changes, in order."""
        return list(self.changes.items())


def judge_sweep(sweep: Sweep, settings: DeploySettings, load: LoadSpec, config: Path, noise_limit: float) -> Outcome:
    """Holds a sweep to noise and objectives.

    Args:
        sweep: as measured.
        settings: the file's.
        load: what was offered.
        config: the settings file, for the record.
        noise_limit: largest believable spread between the first row and its repeat, share of 1.
    """
    spread = spread_of(sweep.first, sweep.again)
    noise = []
    if spread > noise_limit:
        noise.append(
            f"the first row measured again differs by {100 * spread:.0f} %, limit {100 * noise_limit:g} % (--noise)"
        )
    if not all(row.valid for row in (*sweep.best.closed, *sweep.best.opened)):
        noise.append("the load generator was late: use more --load-processes, or leave it a core of its own")
    checks = _checks(sweep.best, settings, load, config)
    if noise:
        code = NO_VERDICT
    elif any(check.held == "passed over" for check in checks):
        code = PAST
    else:
        # A GPU objective that cannot be judged is no fault of the run; a P99 is.
        code = NO_VERDICT if checks[0].held == "not judged" else HELD
    return Outcome(changed(settings, sweep.overrides), spread, tuple(noise), tuple(checks), code)


def changed(settings: DeploySettings, overrides: Overrides) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of every override that differs from the settings."""
    return {name: (old, new) for name, old, new in _leaves(settings, overrides, "") if old != new}


def _leaves(section: Any, overrides: Overrides, prefix: str) -> list[tuple[str, Any, Any]]:
    found = []
    for name, value in overrides.items():
        mine = getattr(section, name)
        if isinstance(value, Mapping):
            found += _leaves(mine, value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", mine, value))
    return found


def _checks(best: Trial, settings: DeploySettings, load: LoadSpec, config: Path) -> list[LineCheck]:
    rows = tuple(replace(row, driver="best") for row in (*best.closed, *best.opened))
    result = BenchResult(_FORMAT, "", {}, str(config), load, {"best": best.setting.label}, rows, ())
    checks = check_line(result, "best", settings.objectives)
    if len(best.opened) < len(best.closed) and load.rate >= settings.objectives.rate:
        words = f"at most {best.throughput:.1f} texts/s were answered, so {load.rate:g} were not offered"
        # Of more than the objective's rate it proves nothing.
        proven = load.rate == settings.objectives.rate
        checks[0] = LineCheck(checks[0].objective, words, "passed over" if proven else "not judged")
    return checks


def axis_grid(swept: Swept, load: LoadSpec, limit_ms: float) -> Grid:
    """The table of an axis, as the reference case printed it: P50, P99, throughput relative to the first row."""
    columns = (swept.axis.title, "P50 ms", "P99 ms", "throughput", "texts/s", "stop line", "")
    base = swept.trials[0].throughput
    rows = []
    for number, trial in enumerate(swept.trials):
        note = f"stopped after round {trial.rounds}: {trial.stopped}" if trial.stopped else _unsure(swept, trial)
        rows.append(
            (
                trial.setting.label,
                milliseconds(trial.p50),
                milliseconds(trial.p99) if math.isfinite(trial.p99) else "over",
                "base" if not number else _percent(trial.throughput, base),
                f"{trial.throughput:.1f}" if trial.closed else "–",
                trial.line(limit_ms),
                "chosen" if trial is swept.chosen else note,
            )
        )
    title = (
        f"{swept.axis.title}: latency at {load.rate:g} texts/s (open loop), highest throughput of {load.clients} "
        f"clients (closed loop), {swept.trials[0].rounds} rounds; stop line P99 {limit_ms:g} ms"
    )
    return Grid(title, columns, tuple(rows))


def _unsure(swept: Swept, trial: Trial) -> str:
    """That a higher throughput was not enough to be sure of; empty where there is none."""
    first = swept.trials[0]
    if trial is first or swept.chosen is not first:
        return ""
    ratio = throughput_ratio(first, trial)
    return f"within noise: {ratio.text()} times; more --rounds" if ratio.ratio > 1 >= ratio.low else ""


def write_outcome(path: Path, sweep: Sweep, outcome: Outcome, load: LoadSpec, config: Path, limit_ms: float) -> None:
    """Writes everything as JSON; infinite and missing figures are null."""
    document = {
        "format": _FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": this_machine_in_words(),
        "config": str(config),
        "load": {
            name: getattr(load, name) for name in ("rate", "clients", "mix", "open_s", "closed_s", "rounds", "seed")
        }
        | {"texts": None if load.corpus is None else len(load.corpus)},
        "p99_limit_ms": limit_ms,
        "axes": [
            {
                "name": swept.axis.name,
                "settings": [_trial(trial, limit_ms) | {"chosen": trial is swept.chosen} for trial in swept.trials],
            }
            for swept in sweep.swept
        ],
        "repeat_of_the_first": _trial(sweep.again, limit_ms),
        "spread": outcome.spread,
        "noise": outcome.noise,
        "changes": {name: {"from": old, "to": new} for name, (old, new) in outcome.items},
        "objectives": [check.text() for check in outcome.checks],
        "verdict": outcome.verdict,
        "exit_status": outcome.code,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plain_json(document), encoding="utf-8")


def _trial(trial: Trial, limit_ms: float) -> dict[str, Any]:
    return {
        "label": trial.setting.label,
        "overrides": trial.setting.overrides,
        "p50_ms": trial.p50,
        "p99_ms": trial.p99,
        "throughput": trial.throughput,
        "throughputs": [row.throughput for row in trial.closed],
        "failed": sum(row.failed for row in (*trial.closed, *trial.opened)),
        "line": trial.line(limit_ms),
        "stopped": trial.stopped,
    }


def _percent(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.0f} %" if base and math.isfinite(value / base) else "–"


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
