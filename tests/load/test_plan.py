import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients import InvalidInput
from clients.load.plan import (
    LoadClass,
    Segment,
    arrival_times,
    closed_plan,
    open_plan,
    parse_classes,
    parse_profile,
    read_trace,
)
from clients.load.texts import Mix, TextSource

SOURCE = TextSource()


def test_a_profile_is_read_as_stretches_ramps_and_spikes() -> None:
    assert parse_profile("20x30, 20-60x10, 200x2") == (Segment(20, 20, 30), Segment(20, 60, 10), Segment(200, 200, 2))


@pytest.mark.parametrize("spec", ["", "20", "20x", "20x0", "x30", "1.2.3x4", "-5x3", "0x5", "1e9x9", "9999999x9999"])
def test_a_profile_that_cannot_be_meant_is_refused(spec: str) -> None:
    with pytest.raises(InvalidInput, match="profile"):
        parse_profile(spec)


def test_constant_arrivals_are_evenly_spaced() -> None:
    times = arrival_times([Segment(10, 10, 2)], "constant", random.Random(0))
    assert times == pytest.approx([0.05 + 0.1 * number for number in range(20)])


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = arrival_times([Segment(50, 50, 200)], "poisson", random.Random(1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.04)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert (gaps > 3 * gaps.mean()).mean() == pytest.approx(np.exp(-3), rel=0.2)


def test_a_ramp_sends_as_much_in_each_part_as_its_rate_says() -> None:
    times = np.array(arrival_times([Segment(0, 100, 10)], "constant", random.Random(0)))
    per_second, _ = np.histogram(times, bins=range(11))
    assert per_second.tolist() == pytest.approx([5, 15, 25, 35, 45, 55, 65, 75, 85, 95], abs=1)


def test_a_pause_sends_nothing_and_a_spike_sends_much() -> None:
    times = np.array(
        arrival_times([Segment(5, 5, 2), Segment(0, 0, 3), Segment(200, 200, 1)], "poisson", random.Random(2))
    )
    assert not ((times > 2) & (times < 5)).any()
    assert 150 < (times >= 5).sum() < 250


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0.1, 5)), min_size=1, max_size=5),
    st.sampled_from(["poisson", "constant"]),
)
@settings(deadline=None)
def test_times_rise_and_stay_within_the_run(parts: list[tuple[float, float, float]], arrivals: str) -> None:
    segments = [Segment(*part) for part in parts]
    times = arrival_times(segments, arrivals, random.Random(0))  # type: ignore[arg-type]
    assert all(a <= b for a, b in pairwise(times))
    assert all(0 <= at <= sum(part[2] for part in parts) + 1e-6 for at in times)


def test_classes_are_read_with_priority_share_and_mix() -> None:
    assert parse_classes(["interactive 70%", "bulk/background 20%: 100% 480", "probe 10%"]) == (
        LoadClass("interactive", 0.7, 1),
        LoadClass("bulk", 0.2, 2, Mix(((1.0, 480),))),
        LoadClass("probe", 0.1, 0),
    )


@pytest.mark.parametrize(
    "specs",
    [
        ["interactive"],
        ["a 50%"],
        ["a 50%", "a 50%"],
        ["a/urgent 100%"],
        ["a/7 100%"],
        ["a 100%: nonsense"],
        ["a 10.0.0%", "b 90%"],
    ],
)
def test_classes_that_cannot_be_meant_are_refused(specs: list[str]) -> None:
    with pytest.raises(InvalidInput):
        parse_classes(specs)


def test_a_class_whose_name_is_a_number_has_no_priority_by_it() -> None:
    assert parse_classes(["7 99.5%", "8 .5%"]) == (LoadClass("7", 0.995, 0), LoadClass("8", 0.005, 0))


@pytest.mark.parametrize("rate", [1e9, float("inf"), float("nan")])
def test_a_rate_of_more_requests_than_can_be_planned_is_refused(rate: float) -> None:
    with pytest.raises(InvalidInput, match="requests of the load"):
        open_plan(SOURCE, [Segment(rate, rate, 30)])


def test_a_closed_loop_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="length of the run"):
        closed_plan(SOURCE, 3, float("inf"))


def test_an_open_plan_names_the_parts_of_a_rate_that_changes() -> None:
    plan = open_plan(SOURCE, parse_profile("20x1, 20-60x0.5"))
    assert plan.stretches == (("0–1 s: 20/s", 0.0), ("1–1.5 s: 20–60/s", 1.0))
    assert open_plan(SOURCE, parse_profile("20x1")).stretches == ()


def test_an_open_plan_mixes_classes_by_share_and_each_has_its_own_lengths() -> None:
    classes = parse_classes(["interactive 75%: 100% 20", "background 25%: 100% 200"])
    plan = open_plan(SOURCE, [Segment(100, 100, 20)], classes, seed=1)
    urgent = [request for request in plan.requests if request.kind == "interactive"]
    rest = [request for request in plan.requests if request.kind == "background"]
    assert len(urgent) / len(plan.requests) == pytest.approx(0.75, abs=0.04)
    assert {request.priority for request in urgent} == {1}
    assert {request.priority for request in rest} == {2}
    assert max(request.tokens for request in urgent) < 40 < 120 < min(request.tokens for request in rest)
    assert plan.rate == pytest.approx(100, rel=0.1)


def test_equal_seeds_give_equal_plans() -> None:
    first, again, other = (open_plan(SOURCE, [Segment(20, 20, 3)], seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_closed_plan_has_as_many_texts_as_asked_for() -> None:
    plan = closed_plan(SOURCE, 30, 5.0)
    assert (len(plan.requests), plan.seconds) == (30, 5.0)
    assert {request.at for request in plan.requests} == {0.0}


def test_a_trace_is_replayed_in_order_from_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"offset_s": 12.0, "text": "second", "priority": "background"},
        {"offset_s": 10.0, "text": "first", "priority": 1, "class": "people"},
        {"offset_s": 16.0, "tokens": 50, "class": "interactive"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    plan = read_trace(path, SOURCE, speed=2.0)
    assert [(r.at, r.kind, r.priority) for r in plan.requests] == [
        (0.0, "people", 1),
        (1.0, "background", 2),
        (3.0, "interactive", 1),
    ]
    assert [r.text for r in plan.requests[:2]] == ["first", "second"]
    assert plan.requests[2].tokens == pytest.approx(50, abs=3)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"text": "a"}',
        '{"offset_s": 1}',
        '{"offset_s": -1, "text": "a"}',
        '{"offset_s": NaN, "text": "a"}',
        '{"offset_s": 1, "text": 5}',
        '{"offset_s": 1, "text": "\\ud800"}',
        '{"offset_s": 1, "tokens": 0}',
        '{"offset_s": 1, "tokens": 1e9}',
        '{"offset_s": 1, "tokens": 1e999}',
        '{"offset_s": 1, "text": "a", "priority": "urgent"}',
        '{"offset_s": 1, "text": "a", "priority": -1}',
        '{"offset_s": 1, "text": "a", "priority": true}',
    ],
)
def test_a_bad_line_of_a_trace_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"offset_s": 0, "text": "good"}\n' + line, encoding="utf-8")
    with pytest.raises(InvalidInput, match="line 2 is no request"):
        read_trace(path, SOURCE)


def test_a_trace_may_hold_what_ends_a_line_only_outside_of_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '\ufeff{"offset_s": 0, "text": "one\u2028still one"}\n{"offset_s": 1, "text": "two"}\n', encoding="utf-8"
    )
    assert [request.text for request in read_trace(path, SOURCE).requests] == ["one\u2028still one", "two"]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_trace_is_not_replayed_at_no_speed(tmp_path: Path, speed: float) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"offset_s": 0, "text": "a"}\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match="speed"):
        read_trace(path, SOURCE, speed=speed)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="no request"):
        read_trace(path, SOURCE)
