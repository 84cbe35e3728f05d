"""One axis after the other, each from what was best so far; interleaved repeats, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from builders.bench.driver import BenchError
from builders.bench.product import merge
from builders.bench.result import Row
from builders.errors import BuilderError
from builders.settings import DeploySettings
from builders.tune.axis import Axis, Setting
from builders.tune.trial import Trial, choose, why_stop

Overrides = Mapping[str, Any]
AxisMaker = Callable[[DeploySettings], Axis | None]
Check = Callable[[str, Overrides], DeploySettings]


class Measure(Protocol):
    """Measures one setting once."""

    def __call__(self, label: str, overrides: Overrides, round_: int) -> tuple[Row, Row | None]:
        """A closed loop, then an open one.

        Args:
            label: of the setting.
            overrides: over the file's settings, those of earlier axes included.
            round_: which of the prepared loads.

        Returns:
            Both rows; the second is None when the closed loop did not even reach the open loop's rate.
        """
        ...


@dataclass(frozen=True)
class SweepSpec:
    """How much is measured: rounds of each setting, the stop line (P99 in milliseconds)."""

    rounds: int
    limit_ms: float


@dataclass(frozen=True)
class Swept:
    """An axis with its measurements.

    Attributes:
        axis: as made.
        trials: one per setting, in the axis' order.
        chosen: one of them.
    """

    axis: Axis
    trials: tuple[Trial, ...]
    chosen: Trial


@dataclass(frozen=True)
class Sweep:
    """A whole tuning run.

    Attributes:
        swept: the axes that had something to vary.
        overrides: what was chosen, over the file's settings.
        again: the first row of the first axis, measured once more at the end.
    """

    swept: tuple[Swept, ...]
    overrides: Overrides
    again: Trial

    @property
    def first(self) -> Trial:
        """The file as it is."""
        return self.swept[0].trials[0]

    @property
    def best(self) -> Trial:
        """The choice, as it was measured last."""
        return self.swept[-1].chosen


def run_sweep(
    settings: DeploySettings,
    axes: Iterable[AxisMaker],
    check: Check,
    measure: Measure,
    spec: SweepSpec,
    say: Callable[[str], None],
) -> Sweep:
    """Sweeps the axes, then measures the first row again.

    Args:
        settings: the file's.
        axes: make each axis from the settings so far, or None when there is nothing to vary.
        check: the file's settings with overrides over them; raises BenchError when they cannot work.
        measure: measures a setting once.
        spec: how much.
        say: told a line per step.

    Raises:
        BenchError: no axis has two settings.
    """
    overrides: Overrides = {}
    now = settings
    done: list[Swept] = []
    for make in axes:
        axis = make(now)
        if axis is None:
            continue
        axis = _possible(axis, overrides, check, say)
        if len(axis.settings) < 2:
            say(f"{axis.title}: nothing to vary")
            continue
        swept = sweep_axis(axis, overrides, measure, spec, say)
        overrides = merge(overrides, swept.chosen.setting.overrides)
        now = check(swept.chosen.setting.label, overrides)
        done.append(swept)
    if not done:
        raise BenchError("there is nothing to sweep", limit="an axis of at least two settings", remedy="see --only")
    again = Trial(Setting("as the file says, once more"))
    for number in range(spec.rounds):
        say(f"the first row again, round {number + 1} of {spec.rounds}")
        _add(again, measure(again.setting.label, {}, number))
    return Sweep(tuple(done), overrides, again)


def sweep_axis(
    axis: Axis, overrides: Overrides, measure: Measure, spec: SweepSpec, say: Callable[[str], None]
) -> Swept:
    """Measures the settings of an axis, round by round, in an order that moves on by one each round.

    A setting that is clearly worse after two rounds or more, or whose server does not start, is not measured on; the
    first always is: it is what the others are compared with.

    Raises:
        BuilderError: the first setting's server does not start.
    """
    trials = tuple(Trial(setting) for setting in axis.settings)
    for number in range(spec.rounds):
        alive = [trial for trial in trials if trial.stopped is None]
        turn = number % len(alive)
        for place, trial in enumerate((*alive[turn:], *alive[:turn]), start=1):
            label = trial.setting.label
            say(f"{axis.title}, round {number + 1} of {spec.rounds}, {place} of {len(alive)}: {label}")
            try:
                _add(trial, measure(f"{axis.title} {label}", merge(overrides, trial.setting.overrides), number))
            except BuilderError as error:  # more processes than its shared memory holds, for example
                if trial is trials[0]:
                    raise
                trial.stopped = f"did not run: {error.what}"
                say(f"{axis.title}: {label} is left out: {error}")
        if number + 1 < spec.rounds:
            _stop(trials, spec.limit_ms, axis, say)
    chosen = choose(trials, spec.limit_ms)
    say(f"{axis.title}: {chosen.setting.label}" + (", as before" if chosen is trials[0] else " from now on"))
    return Swept(axis, trials, chosen)


def _stop(trials: Sequence[Trial], limit_ms: float, axis: Axis, say: Callable[[str], None]) -> None:
    best = choose(trials, limit_ms)
    for trial in trials[1:]:
        if trial.stopped is None and (reason := why_stop(best, trial, limit_ms)):
            trial.stopped = reason
            say(f"{axis.title}: {trial.setting.label} is stopped after round {trial.rounds}: {reason}")


def _add(trial: Trial, rows: tuple[Row, Row | None]) -> None:
    closed, opened = rows
    trial.closed.append(closed)
    if opened is not None:
        trial.opened.append(opened)


def _possible(axis: Axis, overrides: Overrides, check: Check, say: Callable[[str], None]) -> Axis:
    """The axis without the settings that the file's other values rule out; each is said."""
    kept = []
    for setting in axis.settings:
        try:
            check(setting.label, merge(overrides, setting.overrides))
        except BenchError as error:
            say(f"left out: {error}")
            continue
        kept.append(setting)
    return replace(axis, settings=tuple(kept))
