"""Is B slower than A, or is it noise? Bootstrap intervals on ratios, and a sign test for pairs. Pure functions.

Latencies of one run are no independent samples: a slow moment makes many requests slow, and a slow machine makes a
whole round slow. So the bootstrap draws rounds, and inside them stretches of neighbouring requests (a block bootstrap),
never single requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]
Verdict = Literal["slower", "faster", "same", "unclear"]

_DRAWS = 2000
_BLOCK = 25


@dataclass(frozen=True)
class Interval:
    """A ratio and its confidence interval.

    Attributes:
        ratio: of B to A; above 1, B has more of it.
        low, high: ends of the interval.
        level: of the interval, share of 1.
    """

    ratio: float
    low: float
    high: float
    level: float

    def text(self) -> str:
        """For people: `1.08 (1.03 to 1.12)`."""
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Comparison:
    """One figure of B against A.

    Attributes:
        figure: what was compared, with its unit.
        cost: B's cost relative to A's: above 1, B is worse (a throughput is turned round).
        verdict: "slower" when the whole interval is above 1 + tolerance, and "faster" the other way round; "same" when
            all of it lies within the tolerance; "unclear" otherwise, which is no failure.
        tolerance: share of 1 that does not count.
        p: of the sign test, where there are pairs.
    """

    figure: str
    cost: Interval
    verdict: Verdict
    tolerance: float
    p: float | None = None

    def text(self) -> str:
        """One line."""
        sign = "" if self.p is None else f", sign test p = {self.p:.2g}"
        return (
            f"{self.figure}: cost {self.cost.text()} of {100 * self.cost.level:g} %{sign}; "
            f"{self.verdict} (tolerance {100 * self.tolerance:g} %)"
        )


def percentile(share: float) -> Statistic:
    """A statistic: the percentile `share` (50, 99)."""
    return lambda values: float(np.percentile(values, share))


def judge(interval: Interval, tolerance: float) -> Verdict:
    """The verdict of a cost, see `Comparison`."""
    if interval.low > 1 + tolerance:
        return "slower"
    if interval.high < 1 / (1 + tolerance):
        return "faster"
    return "same" if 1 / (1 + tolerance) <= interval.low and interval.high <= 1 + tolerance else "unclear"


def ratio_of_rounds(
    before: Sequence[Floats],
    after: Sequence[Floats],
    statistic: Statistic,
    *,
    level: float = 0.99,
    draws: int = _DRAWS,
    block: int = _BLOCK,
    seed: int = 0,
) -> Interval:
    """Ratio of a statistic of B's latencies to A's, over rounds that have nothing to do with each other.

    The level is true of many rounds. Two or three a side tell little of what rounds differ by, and the interval is then
    about the range of what was seen: ask for a tolerance that rounds of the same build do not differ by.

    Args:
        before: A's rounds, each float64 [n] in the order of time; at least one, none empty.
        after: B's rounds, likewise.
        statistic: of all latencies of a side together.
        level: of the interval, share of 1.
        draws: of the bootstrap.
        block: neighbouring requests that are drawn together.
        seed: of the draws.

    Raises:
        ValueError: a side has no latency.
    """
    if not all(len(side) and all(len(values) for values in side) for side in (before, after)):
        raise ValueError("a side has a round without latencies, or no round")
    chance = np.random.default_rng(seed)
    ratios = np.empty(draws)
    for draw in range(draws):
        sides = [statistic(_drawn(side, chance, block)) for side in (before, after)]
        ratios[draw] = sides[1] / sides[0]
    whole = statistic(np.concatenate(after)) / statistic(np.concatenate(before))
    return _interval(whole, ratios, level)


def ratio_of_figures(
    before: Sequence[float], after: Sequence[float], *, level: float = 0.99, draws: int = _DRAWS, seed: int = 0
) -> Interval:
    """Ratio of the means of one figure a round (a throughput), B to A; at least one round a side, all above 0.

    The rounds of both sides are taken to spread alike, as in Student's test of two samples: of two times three rounds
    each side alone would know too little of its spread to find a slow-down of a third. That holds for as many rounds on
    either side; else the side with fewer decides how little is known.
    """
    chance = np.random.default_rng(seed)
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if not len(a) or not len(b) or (a <= 0).any() or (b <= 0).any():
        raise ValueError("a side has no round, or a figure that is not above 0")
    drawn_a = a[chance.integers(0, len(a), (draws, len(a)))].mean(axis=1)
    drawn_b = b[chance.integers(0, len(b), (draws, len(b)))].mean(axis=1)
    interval = _interval(float(b.mean() / a.mean()), drawn_b / drawn_a, level)
    fewer = min(len(a), len(b))
    return _widened(interval, fewer, 2 * (fewer - 1) if len(a) == len(b) else fewer - 1, level)


def ratio_of_pairs(
    pairs: Sequence[tuple[float, float]], *, level: float = 0.99, draws: int = _DRAWS, seed: int = 0
) -> Interval:
    """Ratio B to A from pairs that ran one right after the other: the trimmed geometric mean of the pairs' ratios.

    What the machine did to both of a pair falls out of its ratio; what it did to one of them makes an outlier, so a
    fifth of the ratios is left out at each end. All figures must be above 0.
    """
    logs = _logs(pairs)
    chance = np.random.default_rng(seed)
    means = _trimmed(logs[chance.integers(0, len(logs), (draws, len(logs)))])
    interval = _interval(float(np.exp(_trimmed(logs[None])[0])), np.exp(means), level)
    return _widened(interval, len(logs), len(logs) - 1, level)


def sign_test(pairs: Sequence[tuple[float, float]]) -> float:
    """Two-sided p of the sign test: how often chance alone would put as many pairs on one side. Ties are left out."""
    logs = _logs(pairs)
    more, n = int((logs > 0).sum()), int((logs != 0).sum())
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(max(more, n - more), n + 1)) / 2**n
    return float(min(1.0, 2 * tail))


def compare_pairs(
    figure: str,
    pairs: Sequence[tuple[float, float]],
    *,
    more_is_better: bool = False,
    tolerance: float = 0.02,
    level: float = 0.99,
    seed: int = 0,
) -> Comparison:
    """One figure of paired runs.

    B is "slower" if the whole interval lies above 1 + tolerance. The p of the sign test goes with it, for the reader.

    Args:
        figure: its name and unit.
        pairs: (A, B), all above 0; at least 6, below which an interval says nothing.
        more_is_better: a throughput; its ratio is turned round, so that a cost above 1 is always worse.
        tolerance: share of 1 that does not count.
        level: of the interval, share of 1.
        seed: of the bootstrap.

    Raises:
        ValueError: there are fewer than 6 pairs, or a figure is not above 0.
    """
    if len(pairs) < 6:
        raise ValueError(f"{len(pairs)} pairs; at least 6 are needed")
    costs = [(b, a) for a, b in pairs] if more_is_better else list(pairs)
    interval = ratio_of_pairs(costs, level=level, seed=seed)
    return Comparison(figure, interval, judge(interval, tolerance), tolerance, sign_test(costs))


def _trimmed(rows: Floats) -> Floats:
    """The mean of each row without a fifth of its values at each end."""
    cut = rows.shape[1] // 5
    means: Floats = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut].mean(axis=1)
    return means


def _logs(pairs: Sequence[tuple[float, float]]) -> Floats:
    values = np.asarray(pairs, np.float64)
    if not len(values) or (values <= 0).any() or not np.isfinite(values).all():
        raise ValueError("there is no pair, or a figure is not above 0")
    logs: Floats = np.log(values[:, 1] / values[:, 0])
    return logs


def _drawn(rounds: Sequence[Floats], chance: np.random.Generator, block: int) -> Floats:
    """One bootstrap sample: as many rounds as there are, and of each as many stretches as fill it."""
    parts = []
    for number in chance.integers(0, len(rounds), len(rounds)):
        values = rounds[number]
        length = min(block, len(values))
        begins = chance.integers(0, len(values) - length + 1, math.ceil(len(values) / length))
        parts.append(values[(begins[:, None] + np.arange(length)).ravel()[: len(values)]])
    return np.concatenate(parts)


def _interval(ratio: float, ratios: Floats, level: float) -> Interval:
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(ratio, float(low), float(high), level)


def _widened(interval: Interval, n: int, freedom: int, level: float) -> Interval:
    """The interval of few values, as wide as Student's t asks for: a bootstrap of 5 values is too sure of itself.

    Args:
        interval: of a bootstrap.
        n: values of the smaller side; of one nothing can be said.
        freedom: degrees of it in what is known of the spread.
        level: of the interval.
    """
    if n < 2:
        return Interval(interval.ratio, 0.0, math.inf, level)
    from statistics import NormalDist

    normal = NormalDist().inv_cdf((1 + level) / 2)
    factor = _student(freedom, level) / normal * math.sqrt(n / (n - 1))
    low, high = (
        interval.ratio * math.exp(factor * math.log(end / interval.ratio)) for end in (interval.low, interval.high)
    )
    # A bootstrap may leave its own estimate out; what is widened must not become narrower for it.
    return Interval(interval.ratio, min(low, interval.low), max(high, interval.high), level)


def _student(freedom: int, level: float) -> float:
    """Quantile of Student's t by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).

    For 1 and 2 degrees of freedom, where the expansion is off, the closed forms.
    """
    from statistics import NormalDist

    share = (1 + level) / 2
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))
