"""Candidate against control: read from a metrics page, compared, told."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from builders.comparison import (
    ArmCounts,
    Limits,
    TrialCounts,
    comparison_table,
    is_hopeless,
    judge,
    judged_quantiles,
    read_counts,
)
from builders.serving.entry.trial import EDGES

LIMITS = Limits()


def arm(times: Sequence[float] = (), *, failed: int = 0, late: int = 0) -> ArmCounts:
    """An arm that answered in these times, seconds."""
    places = [bisect_left(EDGES, time) for time in times]
    within = tuple(float(sum(place <= edge for place in places)) for edge in range(len(EDGES) + 1))
    return ArmCounts({"answered": float(len(times)), "failed": float(failed), "late": float(late)}, within)


def counts(candidate: ArmCounts, control: ArmCounts, requests: float = 1000.0) -> TrialCounts:
    return TrialCounts({"candidate": candidate, "control": control}, (2, 2), requests)


def times(number: int, middle: float = 0.02, seed: int = 0) -> np.ndarray:
    """Times of answers as they are: some are long."""
    return np.random.default_rng(seed).lognormal(np.log(middle), 0.5, number)


@pytest.mark.parametrize("part", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("middle", [0.003, 0.02, 0.7])
def test_quantile_within_a_twentieth_of_the_times_themselves(part: float, middle: float) -> None:
    given = times(20_000, middle)
    found = arm(given).quantile(part)
    assert found == pytest.approx(np.quantile(given, part), rel=0.05)


def test_quantile_of_nothing_is_none_and_of_the_slowest_is_the_last_edge() -> None:
    assert arm().quantile(0.5) is None
    assert arm([1000.0]).quantile(0.5) == EDGES[-1]
    assert arm([0.0002]).quantile(0.99) <= 0.001  # type: ignore[operator]


def test_page_read_for_one_version_of_one_entry() -> None:
    own = 'model="encode",version="1"'
    page = "\n".join(
        [
            "# HELP encoder_lanes_candidate_version Version on trial",
            f'encoder_lanes_candidate_version{{instance="encode_0_0",{own}}} 2',
            f'encoder_lanes_candidate_version{{instance="encode_0_1",{own}}} 0',
            'encoder_lanes_candidate_version{instance="x",model="encode_other",version="1"} 7',
            f'encoder_lanes_candidate_requests_total{{arm="candidate",outcome="answered",{own}}} 5',
            f'encoder_lanes_candidate_requests_total{{arm="control",outcome="late",{own}}} 3',
            'encoder_lanes_candidate_requests_total{arm="control",outcome="late",model="encode",version="2"} 9',
            f'encoder_lanes_candidate_seconds_bucket{{arm="candidate",le="{EDGES[3]:g}",{own}}} 4',
            f'encoder_lanes_candidate_seconds_bucket{{arm="candidate",le="+Inf",{own}}} 5',
            f"nv_inference_request_success{{{own}}} 50",
            'nv_inference_request_success{model="encode",version="2"} 70',
        ]
    )
    found = read_counts(page, "encode", 1)
    assert found.on_trial == (2, 0)
    assert found.requests == 50
    assert found.arms["candidate"].answered == 5
    assert found.arms["candidate"].within[3] == 4
    assert found.arms["candidate"].within[-1] == 5
    assert found.arms["control"].bad == 3
    assert found.share == 0.1
    assert read_counts("", "encode", 1).on_trial == ()


def test_counts_of_before_are_taken_off() -> None:
    before = counts(arm([0.01], failed=1), arm([0.01]), 10)
    after = counts(arm([0.01, 0.02, 0.02], failed=3), arm([0.01, 0.5]), 25).since(before)
    assert after.arms["candidate"] == arm([0.02, 0.02], failed=2)
    assert after.arms["control"].answered == 1
    assert after.requests == 15


def test_version_as_fast_as_the_served_one_is_not_worse() -> None:
    for seed in range(20):
        verdict = judge(counts(arm(times(600, seed=seed)), arm(times(600, seed=seed + 100))), LIMITS)
        assert verdict.kind == "not worse", (seed, verdict)


@pytest.mark.parametrize("number", [100, 600, 5000])
def test_slower_version_is_worse(number: int) -> None:
    verdict = judge(counts(arm(times(number, 0.03)), arm(times(number, 0.02, seed=1))), LIMITS)
    assert verdict.kind == "worse"
    assert "P50 is" in verdict.reasons[0]


def test_version_with_a_longer_tail_alone_is_worse_once_there_are_enough_answers() -> None:
    tail = [0.02] * 940 + [0.4] * 60
    verdict = judge(counts(arm(tail), arm([0.02] * 1000)), LIMITS)
    assert [reason.partition(" ")[0] for reason in verdict.reasons] == ["P95", "P99"]
    few = judge(counts(arm(tail[890:990]), arm([0.02] * 100)), LIMITS)
    assert judged_quantiles(counts(arm(tail[890:990]), arm([0.02] * 100))) == (0.5, 0.9)
    assert [reason.partition(" ")[0] for reason in few.reasons] == ["P90"]


def test_times_of_less_than_a_millisecond_apart_are_the_same() -> None:
    assert judge(counts(arm([0.0019] * 200), arm([0.0012] * 200)), LIMITS).kind == "not worse"


def test_failures_above_the_controls_are_worse() -> None:
    fast = [0.02] * 1000
    assert judge(counts(arm(fast, failed=1), arm(fast)), LIMITS).kind == "not worse"
    verdict = judge(counts(arm(fast, failed=1, late=2), arm(fast)), LIMITS)
    assert verdict.kind == "worse"
    assert verdict.reasons == ("3 of its 1003 requests failed or came too late, 0.30%; limit: 0.10%",)
    assert judge(counts(arm(fast, failed=3), arm(fast, failed=3)), LIMITS).kind == "not worse"


def test_nothing_said_with_too_few_answers() -> None:
    verdict = judge(counts(arm([0.02] * 99), arm([0.02] * 500)), LIMITS)
    assert verdict.kind == "unknown"
    assert "too few answers to compare: 99; limit: at least 100" in verdict.reasons[0]
    assert judge(counts(arm(), arm()), LIMITS).kind == "unknown"
    # What is plain is said: all of a few failed.
    assert judge(counts(arm(failed=12), arm([0.02] * 12)), LIMITS).kind == "worse"


def test_trial_without_hope_ends_early() -> None:
    assert is_hopeless(counts(arm(failed=10), arm()), LIMITS)
    assert not is_hopeless(counts(arm(failed=9), arm()), LIMITS)
    assert not is_hopeless(counts(arm([0.01] * 100, failed=10), arm([0.01] * 100, failed=10)), LIMITS)


def test_table_shows_both_versions_and_what_is_not_judged() -> None:
    console = Console(width=120, record=True)
    console.print(comparison_table(counts(arm([0.02] * 150, late=2), arm([0.01] * 150)), 2, 1))
    _, control, candidate = console.export_text().splitlines()
    assert control.split()[:4] == ["1,", "served", "(control)", "150"]
    assert candidate.split()[:6] == ["2,", "candidate", "150", "0", "2", "0"]
    assert "(" in candidate.split()[-1]
    assert "(" not in candidate.split()[6]
