"""Is this build slower than another: against a stored run, or in many short pairs, one right after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from builders.bench.compare import (
    Comparison,
    Interval,
    compare_pairs,
    judge,
    percentile,
    ratio_of_figures,
    ratio_of_rounds,
)
from builders.bench.driver import BenchError, Driver
from builders.bench.load import LoadSpec, make_load
from builders.bench.result import BenchResult
from builders.bench.rounds import Loop, Measurement, measure, started
from builders.source import EncoderSource
from clients.load.run import Crew

#: What does not count against a stored run: another day, another heat, other neighbours.
STORED_TOLERANCE = 0.10
#: And for a P99, which few samples decide.
STORED_P99_TOLERANCE = 0.15
_SPEED_TOLERANCE = 0.10


@dataclass(frozen=True)
class Against:
    """A run against a stored one.

    Attributes:
        comparisons: throughput, P50, P99 of the product.
        speed: the machine's speed now relative to then.
        comparable: whether that speed is near enough for a verdict.
    """

    comparisons: tuple[Comparison, ...]
    speed: float
    comparable: bool

    @property
    def slower(self) -> bool:
        """Whether a figure got worse by more than noise."""
        return self.comparable and any(one.verdict == "slower" for one in self.comparisons)


def against(stored: BenchResult, fresh: BenchResult, driver: str, *, level: float = 0.99, draws: int = 1000) -> Against:
    """Compares the product of two runs of the same load.

    Args:
        stored: the earlier one.
        fresh: this one.
        driver: name of the product in both.
        level: of the intervals.
        draws: of the bootstrap.

    Raises:
        BenchError: the loads differ, or a run has no answered request of the product.
    """
    check_same_load(stored, fresh.load, fresh.machine)
    sides = [run.latencies(driver) for run in (stored, fresh)]
    rates = [run.throughputs(driver) for run in (stored, fresh)]
    if not all(sides) or not all(rates):
        raise BenchError(f"a run holds no measurement of {driver!r}", remedy="compare runs of the same servers")
    # What is turned round is a cost: before / after of a throughput.
    figures = [("throughput, texts/s", ratio_of_figures(rates[1], rates[0], level=level), STORED_TOLERANCE)]
    for share, tolerance in ((50, STORED_TOLERANCE), (99, STORED_P99_TOLERANCE)):
        interval = ratio_of_rounds(sides[0], sides[1], percentile(share), level=level, draws=draws)
        figures.append((f"P{share} at {fresh.load.rate:g} texts/s, ms", interval, tolerance))
    speed = median(fresh.speeds) / median(stored.speeds)
    comparable = 1 / (1 + _SPEED_TOLERANCE) <= speed <= 1 + _SPEED_TOLERANCE
    return Against(tuple(_compared(*figure) for figure in figures), speed, comparable)


def _compared(figure: str, interval: Interval, tolerance: float) -> Comparison:
    return Comparison(figure, interval, judge(interval, tolerance), tolerance)


def check_same_load(stored: BenchResult, load: LoadSpec, machine: Mapping[str, str]) -> None:
    """Refuses a stored run that another load or another machine gave.

    Raises:
        BenchError: with what differs.
    """
    for name in ("rate", "clients", "mix", "corpus"):
        before, now = getattr(stored.load, name), getattr(load, name)
        if before != now:
            raise BenchError(f"the stored run had another load: {name}", value=before, limit=f"{now!r}, as in this run")
    for name in ("processor", "cores"):
        before, now = stored.machine.get(name), machine.get(name)
        if before != now:
            raise BenchError(f"the stored run is of another machine: {name}", value=before, limit=f"{now!r}, as here")


@dataclass(frozen=True)
class PairSpec:
    """Size of a paired run: pairs, and the seconds of each of the two loads of each side."""

    pairs: int = 20
    seconds: float = 5.0


def run_pairs(
    first: Driver,
    second: Driver,
    source: EncoderSource,
    load: LoadSpec,
    spec: PairSpec,
    console: Console,
) -> tuple[list[Comparison], list[Measurement]]:
    """A and B in many short turns, in an order drawn anew for each pair; both run all the while.

    Args:
        first: A, what is compared with.
        second: B, what may be slower.
        source: the model, for the lengths of texts.
        load: rate, clients and texts; both of a pair get the same texts at the same times.
        spec: how many pairs, how long.
        console: where progress goes.

    Returns:
        Throughput, CPU time a text and P50 of B against A, and all measurements.

    Raises:
        BenchError: fewer than 6 pairs, or a turn in which nothing was answered.
    """
    if spec.pairs < 6:
        raise BenchError("pairs", value=spec.pairs, limit="at least 6")
    loads = make_load(replace(load, rounds=spec.pairs, closed_s=spec.seconds, open_s=spec.seconds), source)
    chance = random.Random(load.seed)  # noqa: S311
    measured: list[Measurement] = []
    with Crew(load.processes) as crew, started(first, console) as target_a, started(second, console) as target_b:
        sides = [(first, target_a), (second, target_b)]
        for number in range(-1, spec.pairs):  # the pair before the first warms both up
            chance.shuffle(sides)
            for plans, clients in ((loads.closed, loads.clients), (loads.opened, 0)):
                for driver, target in sides:
                    plan = plans[max(0, number)]
                    warm = loads.warm_s if clients else 0.0
                    one = measure(
                        driver,
                        target,
                        plan,
                        crew,
                        console,
                        loop="closed" if clients else "open",
                        clients=clients,
                        round_=number,
                        warm_s=warm,
                    )
                    if number >= 0:
                        measured.append(one)
    return pair_comparisons(measured, first.name, second.name), measured


def pair_comparisons(measured: Sequence[Measurement], first: str, second: str) -> list[Comparison]:
    """Throughput and CPU time a text (closed loop) and P50 (open loop) of B against A, pair by pair.

    CPU time sees the smallest slow-downs: what else runs on the machine moves it least. It cannot see a server that
    waits; the other two do.

    Raises:
        BenchError: a turn in which nothing was answered.
    """
    comparisons = []
    for loop, figure, of, more_is_better in _PAIR_FIGURES:
        by_side = {
            name: {one.round: of(one) for one in measured if one.driver == name and one.loop == loop}
            for name in (first, second)
        }
        pairs = [(by_side[first][number], by_side[second][number]) for number in sorted(by_side[first])]
        if of is _cpu_ms and not all(min(pair) > 0 for pair in pairs):
            continue  # turns too short for the clock of /proc
        if not all(np.isfinite(pair).all() and min(pair) > 0 for pair in pairs):
            raise BenchError("a turn of the pairs got no answer", remedy="lengthen the turns, or lower the rate")
        comparisons.append(compare_pairs(figure, pairs, more_is_better=more_is_better))
    return comparisons


def _cpu_ms(one: Measurement) -> float:
    return one.cpu_ms


#: Of a pair: the loop, the figure's name, the figure, whether more of it is better.
_PAIR_FIGURES: tuple[tuple[Loop, str, Callable[[Measurement], float], bool], ...] = (
    ("closed", "throughput, texts/s", lambda one: one.summary.throughput, True),
    ("closed", "CPU time, ms a text", _cpu_ms, False),
    ("open", "P50, ms", lambda one: one.summary.overall.p50, False),
)


def is_checkout(other: Path) -> bool:
    """Whether --paired names a checkout rather than a settings file."""
    return other.is_dir()
