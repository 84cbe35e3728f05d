import json
from dataclasses import replace
from pathlib import Path

import pytest

from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.regression import against
from builders.bench.report import by_class, by_length, side_by_side
from builders.bench.result import Journal, differences, read_result, write_result
from builders.bench.stopline import check_line
from builders.settings.sections import ObjectiveSettings
from tests.bench.servers import result

LINE = ObjectiveSettings(rate=40.0, p99_ms=400.0, gpu_utilization=None)


def test_a_result_comes_back_from_its_file(tmp_path: Path) -> None:
    stored = result()
    write_result(tmp_path / "result.json", stored)
    assert read_result(tmp_path / "result.json") == stored


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"format": 1}', encoding="utf-8")
    with pytest.raises(BenchError, match="no readable result"):
        read_result(tmp_path / "other.json")
    for other in (0, 3):
        write_result(tmp_path / "other.json", replace(result(), format=other))
        with pytest.raises(BenchError, match=f"another format: {other}; limit: 1 or 2"):
            read_result(tmp_path / "other.json")


def test_run_of_before_cpu_time_was_stored_is_compared_in_its_latencies(tmp_path: Path) -> None:
    write_result(tmp_path / "old.json", replace(result(seed=1), format=1))
    document = json.loads((tmp_path / "old.json").read_text())
    for row in document["rows"]:
        del row["cpu_ms"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = read_result(tmp_path / "old.json")
    verdict = against(old, result(seed=2, slower=1.3), "product", draws=50)
    assert verdict.slower
    assert [one.figure.split()[0] for one in verdict.comparisons] == ["P50", "P99"]
    assert "throughput and CPU time a text are not compared" in verdict.left_out[0]
    assert against(result(seed=1), result(seed=2), "product", draws=50).left_out == ()
    unseen = result(seed=2, change=lambda row: replace(row, cpu_ms=0.0))
    assert "too short" in against(result(seed=1), unseen, "product", draws=50).left_out[0]


def test_thirty_percent_against_a_stored_run_are_flagged() -> None:
    verdict = against(result(seed=1), result(seed=2, slower=1.3), "product", draws=200)
    assert verdict.slower
    assert {one.figure: one.verdict for one in verdict.comparisons}["P50 at 40 texts/s, ms"] == "slower"
    assert "cost 1." in verdict.comparisons[0].text()


def test_a_slow_down_that_only_cpu_time_shows_is_flagged() -> None:
    dearer = result(seed=2, change=lambda row: replace(row, cpu_ms=1.3 * (row.cpu_ms or 0)))
    verdict = against(result(seed=1), dearer, "product", draws=50)
    assert [one.figure for one in verdict.comparisons if one.verdict == "slower"] == ["CPU time, ms a text"]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_build_against_a_stored_run_is_not_flagged(seed: int) -> None:
    assert not against(result(seed=10 + seed), result(seed=20 + seed), "product", draws=200).slower


def test_a_machine_of_another_speed_gives_no_verdict() -> None:
    verdict = against(result(seed=1, speed=1000), result(seed=2, slower=1.3, speed=750), "product", draws=50)
    assert not verdict.comparable
    assert not verdict.slower


def test_late_generator_in_either_run_gives_no_verdict() -> None:
    late = result(seed=2, slower=1.3, change=lambda row: replace(row, valid=row.loop == "closed"))
    for stored, fresh, name in ((result(seed=1), late, "this"), (late, result(seed=1), "stored")):
        verdict = against(stored, fresh, "product", draws=50)
        assert not verdict.slower
        assert verdict.doubts == (
            f"the load generator was late, or the limit, in the {name} run; use more --load-processes",
        )


def test_requests_that_failed_make_a_run_slower_not_faster() -> None:
    quick = result(seed=2, slower=0.9, change=lambda row: replace(row, failed=60 if row.loop == "open" else 0))
    verdict = against(result(seed=1), quick, "product", draws=100)
    found = {one.figure: one.verdict for one in verdict.comparisons}
    assert (found["P99 at 40 texts/s, ms"], verdict.slower) == ("slower", True)


def test_server_that_answered_nothing_is_slower_and_no_crash() -> None:
    nothing = {"throughput": 0, "failed": 9, "latencies": (), "kinds": (), "tokens": (), "cpu_ms": 0.0}
    dead = result(seed=2, change=lambda row: replace(row, **nothing))
    verdict = against(result(seed=1), dead, "product", draws=20)
    assert {one.verdict for one in verdict.comparisons} == {"slower"}
    with pytest.raises(BenchError, match="nothing was answered in a round of the stored run"):
        against(dead, result(seed=1), "product", draws=20)


def test_what_else_differs_from_a_stored_run_is_said() -> None:
    stored = replace(
        result(onnxruntime="1.31"), settings={"entry": {"batch": 32, "processes": 2}, "buckets": [16, 512]}
    )
    fresh = replace(result(onnxruntime="1.32"), settings={"entry": {"batch": 16, "processes": 2}, "buckets": [16, 512]})
    assert differences(stored, fresh) == ["onnxruntime 1.31 -> 1.32", "entry.batch 32 -> 16"]
    assert differences(replace(result(), model="a 1"), replace(result(), model="a 2")) == ["model a 1 -> a 2"]
    assert differences(result(), fresh) == ["onnxruntime None -> 1.32"], "a result of before settings were noted"


def test_runs_of_other_loads_or_machines_are_not_compared() -> None:
    with pytest.raises(BenchError, match="another load: seed"):
        against(result(), result(load=LoadSpec(seed=1)), "product")
    with pytest.raises(BenchError, match=r"another load: corpus.*'2 texts'.*None"):
        against(result(load=LoadSpec(corpus=("a", "b"))), result(), "product")
    with pytest.raises(BenchError, match="another load: rate"):
        against(result(), result(load=LoadSpec(rate=10)), "product")
    with pytest.raises(BenchError, match="another machine: cores"):
        against(result(), result(cores="64"), "product")
    with pytest.raises(BenchError, match=r"no measurement of 'other'.*\['product'\]"):
        against(result(), result(), "other")


def test_the_line_holds_below_the_objective_and_is_passed_over_above_it() -> None:
    (held,) = check_line(result(), "product", LINE)
    (over,) = check_line(result(slower=6), "product", LINE)
    assert (held.held, over.held) == ("held", "passed over")
    assert "at most 400 ms" in over.text()


def test_requests_that_failed_count_as_infinitely_slow() -> None:
    (check,) = check_line(result(change=lambda row: replace(row, failed=30)), "product", LINE)
    assert check.held == "passed over"
    assert "more than 1 %" in check.measured
    (few,) = check_line(result(change=lambda row: replace(row, failed=1)), "product", LINE)
    assert few.held == "held"


def test_a_late_generator_or_a_lower_rate_is_no_proof() -> None:
    (late,) = check_line(result(change=lambda row: replace(row, valid=False)), "product", LINE)
    (low,) = check_line(result(load=LoadSpec(rate=10)), "product", LINE)
    assert (late.held, low.held) == ("not judged", "not judged")


def test_past_the_line_above_the_objective_s_rate_proves_nothing_and_below_it_holds_all_the_more() -> None:
    fast = LoadSpec(rate=50)
    (over,) = check_line(result(slower=6, load=fast), "product", LINE)
    (held,) = check_line(result(load=fast), "product", LINE)
    assert (over.held, held.held) == ("not judged", "held")
    assert over.measured.endswith("ms at 50 texts/s")


def test_p99_of_few_requests_is_said_to_be_one() -> None:
    few = result(change=lambda row: replace(row, latencies=row.latencies[:50]))
    (check,) = check_line(few, "product", LINE)
    assert "of 150 requests only" in check.measured
    assert "only" not in check_line(result(), "product", LINE)[0].measured


@pytest.mark.parametrize(("seen", "held"), [(None, "not judged"), (0.5, "passed over"), (0.8, "held")])
def test_gpu_utilisation_is_judged_at_maximum_load_where_there_is_a_gpu(seen: float | None, held: str) -> None:
    measured = result(change=lambda row: replace(row, gpu=seen if row.loop == "closed" else None))
    checks = check_line(measured, "product", ObjectiveSettings(rate=40.0, gpu_utilization=0.7))
    assert [check.held for check in checks][1] == held


def test_tables_have_a_row_per_server_and_figures_relative_to_the_first() -> None:
    slow = tuple(replace(row, driver="other", throughput=row.throughput / 2) for row in result().rows)
    both = replace(result(), rows=(*result().rows, *slow), drivers={"product": "a", "other": "b"})
    grid = side_by_side(both)
    assert [row[0] for row in grid.rows] == ["product", "other"]
    assert [row[grid.columns.index("relative")] for row in grid.rows] == ["1.00", "0.50"]
    assert by_class(both).columns == ("server", "background", "interactive")
    lengths = by_length(both)
    cells = dict(zip(lengths.columns, lengths.rows[0], strict=True))
    assert cells["1–32"] == cells["up to 128"] != "– / – / –"
    assert cells["257–512"] == "– / – / –", "no text is that long"
    assert "over 512" not in cells
    long = replace(both, rows=tuple(replace(row, tokens=(600,) * 600) for row in both.rows))
    whole = dict(zip(by_length(long).columns, by_length(long).rows[0], strict=True))
    p50, p90, p99 = (float(part) for part in whole["over 512"].split(" / "))
    assert p50 < p90 < p99


def test_rows_are_on_disk_as_soon_as_they_are_measured(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "new" / "rows.jsonl", said.append)
    rows = result().rows
    for row in rows[:2]:
        journal.add(row)
    lines = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["loop"] for line in lines] == ["closed", "open"]
    (tmp_path / "new" / "rows.jsonl").unlink()
    (tmp_path / "new" / "rows.jsonl").mkdir()  # as good as a full disk
    journal.add(rows[2])
    journal.add(rows[3])
    assert len(said) == 1
    assert "rows.jsonl is not complete" in said[0]
