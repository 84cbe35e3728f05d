"""The statistics on data whose truth is known."""

import math

import numpy as np
import pytest

from builders.bench.compare import (
    Interval,
    compare_pairs,
    judge,
    percentile,
    ratio_of_figures,
    ratio_of_pairs,
    ratio_of_rounds,
    sign_test,
)
from builders.bench.regression import STORED_TOLERANCE

TRIALS = 150


def pairs(chance: np.random.Generator, effect: float, noise: float, n: int = 20) -> list[tuple[float, float]]:
    """Pairs on a machine whose speed drifts by a fifth; noise is Student's t, with outliers, in each single turn."""
    drift = np.exp(chance.normal(0, 0.2, n))
    a, b = (drift * np.exp(noise * chance.standard_t(4, n)) for _ in range(2))
    return list(zip(a, effect * b, strict=True))


def share_slower(effect: float, noise: float) -> float:
    chance = np.random.default_rng(7)
    found = [compare_pairs("x", pairs(chance, effect, noise), seed=seed).verdict for seed in range(TRIALS)]
    return sum(verdict == "slower" for verdict in found) / TRIALS


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_twenty_pairs_of_the_same_build_are_not_called_slower(noise: float) -> None:
    assert share_slower(1.0, noise) <= 0.01


def test_three_figures_of_the_same_build_together_are_seldom_called_slower() -> None:
    """A paired run fails when one of its three figures does."""
    chance, failed = np.random.default_rng(11), 0
    for seed in range(100):
        figures = [pairs(chance, 1.0, noise) for noise in (0.05, 0.01, 0.05)]
        failed += any(compare_pairs("x", figure, seed=seed).verdict == "slower" for figure in figures)
    assert failed <= 1


def test_a_slow_down_of_a_tenth_is_found_in_twenty_pairs_through_a_drift_twice_as_large() -> None:
    assert share_slower(1.1, 0.02) == 1.0
    assert share_slower(1.1, 0.04) > 0.85


def test_a_throughput_is_turned_round_so_that_less_of_it_is_slower() -> None:
    chance = np.random.default_rng(0)
    less = pairs(chance, 1 / 1.2, 0.02)
    assert compare_pairs("texts/s", less, more_is_better=True).verdict == "slower"
    assert compare_pairs("ms", less).verdict == "faster"


def test_noise_too_large_for_a_verdict_is_unclear_and_no_failure() -> None:
    chance = np.random.default_rng(0)
    assert compare_pairs("x", pairs(chance, 1.0, 0.3)).verdict == "unclear"


def test_one_outlier_does_not_make_a_slow_down() -> None:
    same = [(100.0, 100.0 + number % 3) for number in range(19)]
    assert compare_pairs("x", [*same, (100.0, 1000.0)]).verdict != "slower"


def test_few_pairs_or_figures_that_are_not_above_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        compare_pairs("x", [(1.0, 2.0)] * 5)
    with pytest.raises(ValueError, match="not above 0"):
        ratio_of_pairs([(1.0, 0.0)] * 6)
    with pytest.raises(ValueError, match="not above 0"):
        ratio_of_figures([], [1.0])
    with pytest.raises(ValueError, match="round"):
        ratio_of_rounds([np.array([])], [np.array([1.0])], percentile(50))


def test_the_sign_test_gives_the_binomial_s_tails() -> None:
    assert sign_test([(1.0, 2.0)] * 10) == pytest.approx(2 / 2**10)
    assert sign_test([(1.0, 2.0)] * 5 + [(2.0, 1.0)] * 5) == 1.0
    assert sign_test([(1.0, 1.0)] * 8) == 1.0


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(1.2, 1.11, 1.3, 0.99), "slower"),
        (Interval(1.2, 1.05, 1.4, 0.99), "unclear"),
        (Interval(1.0, 0.95, 1.05, 0.99), "same"),
        (Interval(0.8, 0.7, 0.9, 0.99), "faster"),
    ],
)
def test_the_whole_interval_must_lie_beyond_the_tolerance(interval: Interval, verdict: str) -> None:
    assert judge(interval, 0.1) == verdict


def bursty(chance: np.random.Generator, effect: float, rounds: int = 3, level: float = 0.03) -> list[np.ndarray]:
    """Latencies with slow moments of 25 requests and a level of its own for each round."""
    made = []
    for _ in range(rounds):
        moments = np.repeat(np.exp(chance.normal(0, 0.3, 24)), 25)
        made.append(effect * 40 * np.exp(chance.normal(0, level)) * moments * np.exp(chance.normal(0, 0.2, 600)))
    return made


@pytest.mark.parametrize(("share", "tolerance"), [(50, 0.10), (99, 0.15)])
def test_rounds_of_the_same_build_are_not_called_slower(share: float, tolerance: float) -> None:
    chance = np.random.default_rng(3)
    slower = 0
    for seed in range(25):
        interval = ratio_of_rounds(bursty(chance, 1), bursty(chance, 1), percentile(share), draws=100, seed=seed)
        slower += judge(interval, tolerance) == "slower"
    assert slower <= 1


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_few_rounds_that_differ_by_a_twentieth_stay_within_the_tolerance(rounds: int) -> None:
    """The interval of so few is too narrow; what a stored run tolerates makes up for it."""
    chance, slower = np.random.default_rng(8), 0
    for seed in range(40):
        sides = (bursty(chance, 1, rounds, 0.05), bursty(chance, 1, rounds, 0.05))
        interval = ratio_of_rounds(*sides, percentile(50), draws=60, seed=seed)
        slower += judge(interval, STORED_TOLERANCE) == "slower"
    assert slower <= 1


def test_a_slow_down_of_thirty_percent_is_found_in_the_median_of_three_rounds() -> None:
    chance = np.random.default_rng(4)
    found = 0
    for seed in range(15):
        interval = ratio_of_rounds(bursty(chance, 1), bursty(chance, 1.3), percentile(50), draws=100, seed=seed)
        found += judge(interval, 0.10) == "slower"
        assert interval.low < interval.ratio < interval.high
    assert found >= 12


def test_an_interval_of_correlated_latencies_covers_the_truth() -> None:
    chance = np.random.default_rng(5)
    covered = 0
    for seed in range(25):
        interval = ratio_of_rounds(
            bursty(chance, 1, 5), bursty(chance, 1, 5), percentile(50), level=0.95, draws=100, seed=seed
        )
        covered += interval.low <= 1 <= interval.high
    assert covered >= 20


def test_one_figure_a_side_says_nothing_and_three_say_little() -> None:
    alone = ratio_of_figures([100.0], [130.0])
    assert (alone.ratio, alone.low, alone.high) == (1.3, 0.0, math.inf)
    three = ratio_of_figures([100.0, 101.0, 99.0], [130.0, 131.0, 129.0])
    assert 1.1 < three.low < 1.3 < three.high < 1.5


def test_a_slow_down_of_thirty_percent_is_found_in_the_throughput_of_three_rounds() -> None:
    chance, found, wrong = np.random.default_rng(6), 0, 0
    for seed in range(40):
        before, same, after = (list(level * np.exp(chance.normal(0, 0.025, 3))) for level in (100.0, 100.0, 130.0))
        found += judge(ratio_of_figures(before, after, seed=seed), STORED_TOLERANCE) == "slower"
        wrong += judge(ratio_of_figures(before, same, seed=seed), STORED_TOLERANCE) == "slower"
    assert found >= 36
    assert wrong == 0


def test_the_side_with_fewer_rounds_decides_how_little_is_known() -> None:
    many = [100.0 + number % 3 for number in range(20)]
    assert ratio_of_figures([100.0, 102.0], many).low < ratio_of_figures(many, many).low / 1.1


def test_equal_seeds_give_equal_intervals() -> None:
    some = pairs(np.random.default_rng(1), 1.05, 0.05)
    assert ratio_of_pairs(some, seed=3) == ratio_of_pairs(some, seed=3) != ratio_of_pairs(some, seed=4)
