import json
from pathlib import Path

import numpy as np
import pytest

from clients import InvalidInput
from clients.load.plan import Plan, Request
from clients.load.records import Records, joined, write_records
from clients.load.report import latency_grids
from clients.load.summary import summarise

PLAN = Plan(tuple(Request(float(number) / 100, "text", "all", 0, 10) for number in range(1000)), 10.0, True)


def records(
    latencies_ms: list[float], *, late_ms: float = 0.0, status: str = "ok", kind: str = "all", tokens: int = 10
) -> Records:
    made = Records()
    for number, latency in enumerate(latencies_ms):
        at = number / 100
        request = Request(at, "text", kind, 0, tokens)
        made.add(request, at, at + late_ms / 1000, at + latency / 1000, 0, status)
    return made


def test_latency_counts_from_when_a_request_was_due() -> None:
    made = records([100.0], late_ms=80.0)
    assert made.latency_ms() == pytest.approx([100.0])
    assert made.lateness_ms() == pytest.approx([80.0])


def test_percentiles_are_those_of_the_answered_requests() -> None:
    summary = summarise(records([float(number) for number in range(1, 1001)]), PLAN)
    assert summary.overall.p50 == pytest.approx(500.5)
    assert summary.overall.p99 == pytest.approx(990, abs=1)
    assert (summary.overall.longest, summary.overall.failed, summary.offered) == (1000.0, 0, 100.0)
    assert (summary.overall.sure_p99, summary.overall.sure_p999) == (True, False)


def test_a_failed_request_is_infinitely_slow_to_a_stop_line() -> None:
    good = records([10.0] * 980)
    bad = records([1.0] * 20, status="Overloaded")
    summary = summarise(joined([good, bad]), PLAN)
    assert summary.overall.p99 == pytest.approx(10.0)
    assert summary.p99_or_failed == np.inf
    assert dict(summary.errors) == {"Overloaded": 20}
    assert any("20 of 1000 requests failed" in warning for warning in summary.warnings)


def test_lateness_above_the_limit_makes_an_open_loop_invalid_and_a_closed_one_not() -> None:
    made = records([50.0] * 600, late_ms=15.0)
    assert not summarise(made, PLAN).valid
    assert summarise(made, PLAN, late_limit_ms=20).valid
    assert summarise(made, PLAN, clients=4).valid


def test_a_closed_loop_whose_generator_computed_all_the_time_is_invalid() -> None:
    made = records([50.0] * 600)
    made.busy = 0.97
    summary = summarise(made, PLAN, clients=4)
    assert not summary.valid
    assert summary.warnings[0].startswith("INVALID: the generator was the bottleneck: a process of it was busy 97 %")
    made.busy = 0.5
    assert summarise(made, PLAN, clients=4).valid


def test_the_first_words_of_each_kind_of_error_are_given() -> None:
    made = records([50.0] * 600, status="InvalidInput")
    made.said = {"InvalidInput": "an input is missing", "Overloaded": "in the warm-up alone"}
    warnings = summarise(made, PLAN).warnings
    assert "InvalidInput, for example: an input is missing" in warnings
    assert not any("Overloaded" in warning for warning in warnings)


def test_one_request_that_fails_late_does_not_stretch_the_time_of_the_throughput() -> None:
    late = records([60_000.0], status="DeadlineExceeded")
    summary = summarise(joined([records([5.0] * 1000), late]), PLAN)
    assert (summary.seconds, summary.throughput) == (pytest.approx(10.0), pytest.approx(100.0))
    slow = summarise(joined([records([5.0] * 1000), records([60_000.0])]), PLAN)
    assert slow.seconds == pytest.approx(60.0), "an answer that comes late does"


def test_each_part_of_a_rate_that_changes_has_its_own_figures() -> None:
    plan = Plan(PLAN.requests, 10.0, True, (("calm", 0.0), ("spike", 8.0)))
    summary = summarise(records([10.0] * 800 + [500.0] * 200), plan)
    assert [(one.name, one.requests, one.p50) for one in summary.stretches] == [
        ("calm", 800, pytest.approx(10)),
        ("spike", 200, pytest.approx(500)),
    ]
    assert latency_grids(summary)[-1].title == "by part of the profile"


def test_a_percentile_of_too_few_answers_stands_in_brackets() -> None:
    def row(number: int) -> tuple[str, ...]:
        return latency_grids(summarise(records([10.0] * number), PLAN))[0].rows[0][3:7]

    assert row(49) == ("10.0", "(10.0)", "(10.0)", "(10.0)")
    assert row(500) == ("10.0", "10.0", "10.0", "(10.0)")


def test_groups_are_made_by_class_and_by_length() -> None:
    made = joined([records([10.0] * 50, kind="short", tokens=20), records([90.0] * 30, kind="long", tokens=300)])
    summary = summarise(made, PLAN)
    assert [(one.name, one.requests, one.p50) for one in summary.classes] == [
        ("long", 30, pytest.approx(90)),
        ("short", 50, pytest.approx(10)),
    ]
    assert [(one.name, one.requests) for one in summary.lengths] == [("1–32", 50), ("257–512", 30)]


def test_the_server_s_own_token_counts_group_when_the_generator_only_estimated() -> None:
    made = records([10.0] * 10, tokens=20)
    made.answered = [200] * 10
    assert [one.name for one in summarise(made, PLAN).lengths] == ["1–32"]
    assert [one.name for one in summarise(made, Plan(PLAN.requests, 10.0, False)).lengths] == ["129–256"]


def test_few_requests_are_said_to_be_few() -> None:
    assert any("few for a P99" in warning for warning in summarise(records([1.0] * 100), PLAN).warnings)
    assert not summarise(records([1.0] * 600), PLAN).warnings


def test_the_throughput_of_a_closed_loop_leaves_out_the_warm_up_and_what_ended_too_late() -> None:
    made = records([5.0] * 1000)  # one every 10 ms, 10 s in all
    made.done[-1] = 11.0
    made.done[0] = 3.0  # begun in the warm-up, done after it
    summary = summarise(made, PLAN, clients=1, warm_s=2.0)
    assert summary.seconds == pytest.approx(8.0)
    assert summary.throughput == pytest.approx(800 / 8)


def test_nothing_left_to_summarise_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no request is left"):
        summarise(records([1.0]), PLAN, warm_s=5)


def test_a_run_that_was_cut_short_is_held_against_what_was_due_until_then() -> None:
    parts = [records([5.0] * 300), records([5.0] * 300)]
    parts[0].cut_s, parts[0].given_up, parts[1].cut_s, parts[1].given_up = 3.99, 2, 4.0, 1
    plan = Plan(PLAN.requests, 10.0, True, (("calm", 0.0), ("spike", 8.0)))
    summary = summarise(joined(parts), plan)
    assert (summary.cut_s, summary.seconds, summary.offered, summary.throughput) == (4.0, 4.0, 100.0, 150.0)
    assert [one.name for one in summary.stretches] == ["calm"]
    assert summary.warnings[0].startswith("INTERRUPTED after 4.0 of 10.0 s; 3 requests")
    closed = summarise(joined(parts), plan, clients=2, warm_s=1.0)
    assert (closed.seconds, closed.throughput) == (3.0, pytest.approx(400 / 3))
    assert plan.until(10.0) is plan


def test_records_are_whole_in_their_file_and_processes_are_merged_by_due_time(tmp_path: Path) -> None:
    merged = joined([records([1.0, 2.0]), records([3.0, 4.0], kind="other\u2028class")])
    assert merged.scheduled == [0.0, 0.0, 0.01, 0.01]
    write_records(tmp_path / "r.jsonl", merged)
    lines = (tmp_path / "r.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == list(merged.rows())
    assert [row["kind"] for row in merged.rows()] == merged.kind
