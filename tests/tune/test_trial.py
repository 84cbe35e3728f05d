"""Which of two settings is better, and which need not be measured on."""

from __future__ import annotations

import math
from dataclasses import replace

from builders.tune.trial import better, choose, clearly_past, spread_of, why_stop
from tests.tune.rows import row, trial

LINE = 400.0


def test_more_throughput_wins_within_the_line_and_never_beyond_it() -> None:
    """The table of the reference case: 10 ms / 32 is best, since 20 ms / 64 is past 400 ms."""
    table = [
        trial(100, 180, 320, label="5/16"),
        trial(145, 210, 370, label="10/32"),
        trial(178, 280, 520, label="20/64"),
        trial(182, 350, 680, label="30/64"),
    ]
    assert [one.line(LINE) for one in table] == ["keeps", "keeps", "past", "past"]
    assert choose(table, LINE).setting.label == "10/32"
    assert choose(table, 1000).setting.label == "30/64"


def test_setting_so_far_stays_when_another_is_better_by_noise_alone() -> None:
    now, other = trial(100, 180, 320), trial(100.3, 179, 318, label="b")
    assert not better(now, other, LINE)
    assert choose([now, other], LINE) is now


def test_clearly_lower_p99_wins_at_equal_throughput_and_not_at_less() -> None:
    now = trial(100, 180, 320)
    assert better(now, trial(100, 90, 160), LINE)
    assert not better(now, trial(80, 90, 160), LINE)


def test_p99_of_few_requests_decides_nothing() -> None:
    now, other = trial(100, 180, 320), trial(100, 90, 160)
    for one in (now, other):
        one.opened = [replace(part, latencies=part.latencies[:100]) for part in one.opened]
    assert not better(now, other, LINE)
    assert not clearly_past(now, 100)


def test_only_one_that_keeps_the_line_wins_and_past_it_the_lower_p99() -> None:
    assert better(trial(200, 180, 700), trial(50, 100, 200), LINE)
    assert not better(trial(50, 100, 200), trial(200, 180, 700), LINE)
    assert better(trial(100, 400, 900), trial(100, 300, 500), LINE)


def test_failed_and_unoffered_requests_are_past_the_line() -> None:
    failing = trial(100, 50, 100)
    failing.opened = [row("open", number, 100, 50, 100, failed=20) for number in range(3)]
    assert (failing.p99, failing.line(LINE)) == (math.inf, "past")
    overloaded = trial(100, 50, 100)
    overloaded.opened.pop()
    assert (overloaded.p99, overloaded.line(LINE)) == (math.inf, "past")
    assert clearly_past(overloaded, LINE)


def test_clearly_worse_is_stopped_after_two_rounds_and_what_is_close_never() -> None:
    best = trial(100, 100, 200, rounds=2)
    assert why_stop(best, trial(60, 100, 200, rounds=1), LINE) is None
    assert why_stop(best, trial(60, 100, 200, rounds=2), LINE) == "clearly less throughput"
    assert why_stop(best, trial(100, 400, 900, rounds=2), LINE) == "clearly past the stop line"
    assert why_stop(best, trial(100.2, 100, 200, rounds=2), LINE) is None
    assert why_stop(best, best, LINE) is None


def test_spread_is_that_of_the_worse_figure() -> None:
    assert spread_of(trial(100, 100, 200), trial(100, 100, 200)) == 0
    assert abs(spread_of(trial(100, 100, 200), trial(80, 100, 200)) - 0.25) < 0.05
    assert abs(spread_of(trial(100, 100, 200), trial(100, 130, 200)) - 0.30) < 0.05
