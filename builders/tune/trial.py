"""One setting's measurements, and the judgement between two settings. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from builders.bench.compare import Floats, Interval, percentile, ratio_of_pairs, ratio_of_rounds
from builders.bench.result import Row, pooled
from builders.bench.stopline import ENOUGH_FOR_P99, p99_with_failures
from builders.tune.axis import Setting

Line = Literal["keeps", "past"]

#: Level of the intervals that stop a setting or prefer one to another: a wrong stop costs a setting, no user.
_LEVEL = 0.90
#: Throughputs nearer than this are equal: nothing is stopped or preferred for it.
_THROUGHPUT_TOLERANCE = 0.02
#: By how much a P99 must be lower to count.
_P99_TOLERANCE = 0.05
_DRAWS = 300


@dataclass
class Trial:
    """A setting and what was measured of it so far, one closed and one open loop a round.

    Attributes:
        setting: as above.
        closed: rows of the closed loop, by round.
        opened: rows of the open loop; shorter when a round's rate was above what the closed loop had managed.
        stopped: why it was not measured to the end, or None.
    """

    setting: Setting
    closed: list[Row] = field(default_factory=list)
    opened: list[Row] = field(default_factory=list)
    stopped: str | None = None

    @property
    def rounds(self) -> int:
        """Rounds measured."""
        return len(self.closed)

    @property
    def throughput(self) -> float:
        """Median of the rounds, texts a second; NaN before the first."""
        return median(row.throughput for row in self.closed) if self.closed else math.nan

    @property
    def latencies(self) -> list[Floats]:
        """float64 [n] a round, milliseconds."""
        return [np.asarray(row.latencies) for row in self.opened if row.latencies]

    @property
    def p50(self) -> float:
        """Of all rounds together, milliseconds; NaN without an answer."""
        return pooled(self.latencies, 50)

    @property
    def p99(self) -> float:
        """Of all rounds together, failed requests infinitely slow; infinite when a round could not take the rate."""
        return p99_with_failures(self.opened) if len(self.opened) == len(self.closed) else math.inf

    def line(self, limit_ms: float) -> Line:
        """Whether the P99 keeps the stop line."""
        return "keeps" if self.opened and self.p99 <= limit_ms else "past"


def throughput_ratio(base: Trial, other: Trial) -> Interval:
    """Of `other` to `base`, from the rounds that both were measured in, one right after the other."""
    theirs = {row.round: row.throughput for row in other.closed}
    pairs = [(row.throughput, theirs[row.round]) for row in base.closed if row.round in theirs]
    if not pairs or min(min(pair) for pair in pairs) <= 0:
        return Interval(0.0 if other.throughput == 0 else math.inf, 0.0, math.inf, _LEVEL)
    return ratio_of_pairs(pairs, level=_LEVEL)


def p99_ratio(base: Sequence[Floats], other: Sequence[Floats]) -> Interval:
    """P99 of `other` to that of `base`, from rounds of latencies."""
    return ratio_of_rounds(base, other, percentile(99), level=_LEVEL, draws=_DRAWS)


def clearly_past(trial: Trial, limit_ms: float) -> bool:
    """Whether noise cannot explain that the P99 lies above the line; never of fewer than 500 latencies."""
    if math.isinf(trial.p99):
        return True
    return _enough(trial) and p99_ratio([np.array([limit_ms])], trial.latencies).low > 1


def why_stop(best: Trial, trial: Trial, limit_ms: float) -> str | None:
    """Why a setting need not be measured on, or None.

    Args:
        best: the best so far, measured in the same rounds.
        trial: another one, of at least two rounds: of one alone there is no interval.
        limit_ms: the stop line.
    """
    if trial.rounds < 2 or trial is best:
        return None
    if clearly_past(trial, limit_ms) and best.line(limit_ms) == "keeps":
        return "clearly past the stop line"
    slower = throughput_ratio(best, trial).high < 1 - _THROUGHPUT_TOLERANCE
    # While the best is past the line itself, a quicker one may still take its place.
    if slower and (best.line(limit_ms) == "keeps" or not _clearly_quicker(best, trial)):
        return "clearly less throughput"
    return None


def better(now: Trial, other: Trial, limit_ms: float) -> bool:
    """Whether `other` should take the place of `now`: by more than noise, or because it alone keeps the line.

    Between two that keep the line the throughput decides; at equal throughput a clearly lower P99.
    """
    lines = now.line(limit_ms), other.line(limit_ms)
    if lines == ("keeps", "past"):
        return False
    if lines == ("past", "keeps"):
        return True
    if lines == ("past", "past"):
        return _clearly_quicker(now, other)
    ratio = throughput_ratio(now, other)
    if ratio.low > 1 and ratio.ratio > 1 + _THROUGHPUT_TOLERANCE:
        return True
    return ratio.ratio >= 1 - _THROUGHPUT_TOLERANCE and _clearly_quicker(now, other)


def choose(trials: Sequence[Trial], limit_ms: float) -> Trial:
    """The best of an axis; the first, which is the setting so far, unless another is better by more than noise."""
    best = trials[0]
    for trial in trials[1:]:
        if trial.stopped is None and better(trials[0], trial, limit_ms) and _ahead(best, trial, trials[0], limit_ms):
            best = trial
    return best


def _ahead(best: Trial, trial: Trial, first: Trial, limit_ms: float) -> bool:
    """Between two that are both better than the first: the line, then the throughput, then the P99."""
    if best is first:
        return True
    return _rank(trial, limit_ms) > _rank(best, limit_ms)


def _rank(trial: Trial, limit_ms: float) -> tuple[bool, float, float]:
    keeps = trial.line(limit_ms) == "keeps"
    return keeps, trial.throughput if keeps else -trial.p99, -trial.p99


def _clearly_quicker(now: Trial, other: Trial) -> bool:
    if math.isinf(other.p99):
        return False
    if math.isinf(now.p99):
        return True
    if not (_enough(now) and _enough(other)):
        return False
    return p99_ratio(now.latencies, other.latencies).high < 1 / (1 + _P99_TOLERANCE)


def _enough(trial: Trial) -> bool:
    return sum(len(values) for values in trial.latencies) >= ENOUGH_FOR_P99


def spread_of(first: Trial, again: Trial) -> float:
    """How far the repeat of a setting lies from its first measurement: throughput and P50, the larger, share of 1."""
    pairs = [(first.throughput, again.throughput), (first.p50, again.p50)]
    ratios = [max(a, b) / min(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and min(a, b) > 0]
    return max(ratios, default=math.inf) - 1
