"""Is this build slower than another: against a stored run, or in many short pairs, one right after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from builders.bench.compare import (
    Comparison,
    Floats,
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
#: A failed request as a latency, milliseconds: the deadline of the load's clients, who waited that long in vain.
_UNANSWERED_MS = 60_000.0
#: Fewer pairs say nothing.
_FEWEST_PAIRS = 6
#: Loads of a paired run in which the generator may be late, share of 1: so many ratios are left out at either end.
_FEW_LATE = 0.2
#: A share of failed requests above the other side's by this is worse, whatever the answered ones took.
_FAILED_TOLERANCE = 0.01


@dataclass(frozen=True)
class Against:
    """A run against a stored one.

    Attributes:
        comparisons: throughput, CPU time a text, P50, P99 of the product.
        speed: the machine's speed now relative to then.
        doubts: why there is no verdict; empty when there is one.
        left_out: why a figure is not compared; the verdict is that of the others.
    """

    comparisons: tuple[Comparison, ...]
    speed: float
    doubts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def comparable(self) -> bool:
        """Whether there is a verdict."""
        return not self.doubts

    @property
    def slower(self) -> bool:
        """Whether a figure got worse by more than noise."""
        return self.comparable and any(one.verdict == "slower" for one in self.comparisons)


def against(stored: BenchResult, fresh: BenchResult, driver: str, *, level: float = 0.99, draws: int = 1000) -> Against:
    """Compares the product of two runs of the same load; a failed request counts as the longest wait.

    Args:
        stored: the earlier one.
        fresh: this one.
        driver: name of the product in both.
        level: of the intervals. With two or three rounds a side a bootstrap of rounds is too sure of itself (all of one
            side lie above all of the other in one run of 6 or 20 of the same build): there the tolerances decide, which
            are several times what rounds of the same build differ by.
        draws: of the bootstrap.

    Raises:
        BenchError: the loads differ, or a run has no measurement of the product, the stored one with every round
            answered.
    """
    check_stored(stored, driver, fresh.load, fresh.machine)
    sides = [_with_failures(run, driver) for run in (stored, fresh)]
    rates = [run.throughputs(driver) for run in (stored, fresh)]
    if not all(sides) or not all(rates):
        raise BenchError(f"this run holds no measurement of {driver!r}", remedy="compare runs of the same servers")
    # What is turned round is a cost: before / after of a throughput.
    nothing = Interval(math.inf, math.inf, math.inf, level)
    cost = nothing if min(rates[1]) <= 0 else ratio_of_figures(rates[1], rates[0], level=level)
    figures, left_out = list[tuple[str, Interval, float]](), list[str]()
    work = [_cpu_of(run, driver) for run in (stored, fresh)]
    if any(row.cpu_ms is None for row in stored.rows):  # of format 1
        # Of texts as they were drawn a quick server got others than a slow one: that alone is up to a tenth.
        left_out.append(
            "throughput and CPU time a text are not compared: the stored run is of before closed loops were dealt out "
            "evenly and CPU time was noted; run it again"
        )
    else:
        figures.append(("throughput, texts/s", cost, STORED_TOLERANCE))
        if all(work):
            figures.append(("CPU time, ms a text", ratio_of_figures(*work, level=level), STORED_TOLERANCE))
        else:
            left_out.append(
                "CPU time a text is not compared: a round has none, since it was too short for the system's clock, "
                "nothing was answered, or the server died"
            )
    for share, tolerance in ((50, STORED_TOLERANCE), (99, STORED_P99_TOLERANCE)):
        interval = ratio_of_rounds(sides[0], sides[1], percentile(share), level=level, draws=draws)
        figures.append((f"P{share} at {fresh.load.rate:g} texts/s, ms", interval, tolerance))
    speed = median(fresh.speeds) / median(stored.speeds) if fresh.speeds and stored.speeds else math.nan
    doubts = []
    if not 1 / (1 + _SPEED_TOLERANCE) <= speed <= 1 + _SPEED_TOLERANCE:
        doubts.append(f"the machine is {speed:.2f} times as fast as in the stored run; run both again")
    for name, run in (("stored", stored), ("this", fresh)):
        if not all(row.valid for row in (*run.of(driver, "closed"), *run.of(driver, "open"))):
            doubts.append(f"the load generator was late, or the limit, in the {name} run; use more --load-processes")
    return Against(tuple(_compared(*figure) for figure in figures), speed, tuple(doubts), tuple(left_out))


def _cpu_of(run: BenchResult, driver: str) -> list[float]:
    """CPU time a text of each closed loop, milliseconds; empty where a round has none, or the format had none yet."""
    found = [row.cpu_ms or 0.0 for row in run.of(driver, "closed")]
    return found if min(found) > 0 else []


def _with_failures(run: BenchResult, driver: str) -> list[Floats]:
    """float64 [n] a round of the open loop, milliseconds; failed requests, whose time is not stored, evenly in it."""
    sides = []
    for row in run.of(driver, "open"):
        latencies = np.asarray(row.latencies, np.float64)
        places = np.linspace(0, len(latencies), row.failed).astype(np.int64)
        if row.latencies or row.failed:
            sides.append(np.insert(latencies, places, _UNANSWERED_MS))
    return sides


def _compared(figure: str, interval: Interval, tolerance: float) -> Comparison:
    return Comparison(figure, interval, judge(interval, tolerance), tolerance)


def check_stored(stored: BenchResult, driver: str, load: LoadSpec, machine: Mapping[str, str]) -> None:
    """Refuses a stored run that a new one cannot be compared with, before that one has taken its minutes.

    Raises:
        BenchError: it has no measurement of the server, or a round without an answer; or another load or another
            machine gave it: with what differs.
    """
    if not stored.throughputs(driver) or not stored.of(driver, "open"):
        raise BenchError(
            f"the stored run holds no measurement of {driver!r}", value=list(stored.drivers),
            remedy="name the result.json of a bench",
        )  # fmt: skip
    if min(stored.throughputs(driver)) <= 0 or not stored.latencies(driver):
        raise BenchError("nothing was answered in a round of the stored run", remedy="run that one again")
    for name in ("rate", "clients", "mix", "corpus", "seed", "open_s", "closed_s"):
        before, now = getattr(stored.load, name), getattr(load, name)
        if before != now:
            limit = f"{_in_words(now)!r}, as in this run"
            remedy = "give this run the options of the stored one, or run that one again"
            raise BenchError(
                f"the stored run had another load: {name}", value=_in_words(before), limit=limit, remedy=remedy
            )
    for name in ("processor", "cores"):
        here, there = machine.get(name), stored.machine.get(name)
        if here != there:
            raise BenchError(f"the stored run is of another machine: {name}", value=there, limit=f"{here!r}, as here")


def _in_words(value: object) -> object:
    return f"{len(value)} texts" if isinstance(value, tuple) else value


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
    record: Callable[[Measurement], None] | None = None,
) -> tuple[list[Comparison], list[Measurement]]:
    """A and B in many short turns, in an order drawn anew for each pair; both run all the while.

    Args:
        first: A, what is compared with.
        second: B, what may be slower.
        source: the model, for the lengths of texts.
        load: rate, clients and texts; both of a pair get the same texts at the same times.
        spec: how many pairs, how long.
        console: where progress goes.
        record: told each measurement as soon as there is one, those of the pair that warms up (round -1) as well.

    Returns:
        Throughput, CPU time a text and P50 of B against A as far as they can be compared, and all measurements. After
        a pair in which a side died, or answered nothing at all, no further one is measured; that one always counts.

    Raises:
        BenchError: fewer than 6 pairs.
        BuilderError: a side did not start.
    """
    if spec.pairs < _FEWEST_PAIRS:
        raise BenchError("pairs", value=spec.pairs, limit=f"at least {_FEWEST_PAIRS}")
    loads = make_load(replace(load, rounds=spec.pairs, closed_s=spec.seconds, open_s=spec.seconds), source)
    chance = random.Random(load.seed)  # noqa: S311
    measured: list[Measurement] = []
    with Crew(load.processes) as crew, started(first, console) as target_a, started(second, console) as target_b:
        sides = [(first, target_a), (second, target_b)]
        for number in range(-1, spec.pairs):  # the pair before the first warms both up
            chance.shuffle(sides)
            turns: list[Measurement] = []
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
                        others=[other for other, _ in sides if other is not driver],
                    )
                    turns.append(one)
                    if record is not None:
                        record(one)
            lost = any(_lost_rounds(turns, driver.name) for driver, _ in sides)
            if number >= 0 or lost:
                measured += turns
            if lost:
                break
    return pair_comparisons(measured, first.name, second.name), measured


def pair_comparisons(measured: Sequence[Measurement], first: str, second: str) -> list[Comparison]:
    """Throughput and CPU time a text (closed loop) and P50 (open loop) of B against A, pair by pair.

    CPU time sees the smallest slow-downs: what else runs on the machine moves it least. It cannot see a server that
    waits; the other two do.

    A figure that a turn does not have, or of too few pairs, is left out: `pair_doubts` says why. Without the turns that
    lack it the rest would be the better for them.
    """
    comparisons = []
    for loop, figure, of, more_is_better in _PAIR_FIGURES:
        by_side = {
            name: {one.round: of(one) for one in measured if one.driver == name and one.loop == loop}
            for name in (first, second)
        }
        pairs = [(by_side[first][number], by_side[second][number]) for number in sorted(by_side[first])]
        if len(pairs) < _FEWEST_PAIRS or not all(value > 0 for pair in pairs for value in pair):  # nor NaN
            continue
        comparisons.append(compare_pairs(figure, pairs, more_is_better=more_is_better))
    return comparisons


def pair_doubts(measured: Sequence[Measurement], first: str, second: str) -> list[str]:
    """Why pairs of which B is not the worse are no proof that it is as good; empty when they are."""
    doubts = []
    if _lost_rounds(measured, first):
        doubts.append(f"{first} ended by itself or answered nothing: there is nothing to compare with")
    for name in (first, second):
        silent = [_is_silent(one) for one in measured if one.driver == name]
        if any(silent):
            doubts.append(
                f"{name} answered nothing in time in {sum(silent)} of {len(silent)} turns; lengthen them "
                "(--pair-seconds) or lower the rate"
            )
    if sum(not one.summary.valid for one in measured) > _FEW_LATE * len(measured):
        # It limited both alike: that they are the same says nothing.
        doubts.append("the load generator was late, or the limit; use more --load-processes")
    return doubts


def worse_without_figures(measured: Sequence[Measurement], first: str, second: str) -> str | None:
    """That B is worse whatever its figures are, in words: it was lost, or failed more requests than A. None if neither.

    What was answered may be the faster for what was not.
    """
    if _lost_rounds(measured, second) - _lost_rounds(measured, first):
        how = "ended by itself" if any(one.ended for one in measured if one.driver == second) else "answered nothing"
        return f"{second} {how}, {first} did not: worse"
    shares = []
    for name in (first, second):
        records = [one.records for one in measured if one.driver == name]
        shares.append(sum(int((~one.ok()).sum()) for one in records) / max(1, sum(map(len, records))))
    if shares[1] <= shares[0] + _FAILED_TOLERANCE:
        return None
    return f"{second} failed {100 * shares[1]:.1f} % of its requests, {first} {100 * shares[0]:.1f} %: worse"


def _is_silent(turn: Measurement) -> bool:
    """Whether a turn got no answer, in a closed loop within its time."""
    return not (turn.summary.throughput if turn.loop == "closed" else turn.records.ok().any())


def _lost_rounds(measured: Sequence[Measurement], name: str) -> set[int]:
    """Pairs in which a side died or answered nothing: in those after it, it would be the same."""
    own = [one for one in measured if one.driver == name]
    answered = {one.round for one in own if one.records.ok().any()}
    return {one.round for one in own if one.ended or one.round not in answered}


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
