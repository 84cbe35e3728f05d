"""The soak's verdict, on readings that are made up: what is steady holds, and each kind of drift is found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.measurements.steadiness import Limits, Line, Window, growth_by_process, judge, table, turns_table
from tests.tools.footprint import Footprint, Held

#: Windows of a turn, and turns, of the long soak.
TURN, TURNS = 10, 6
HALF_MINUTE = 30.0


def window(number: int, **changed: float) -> Window:
    """Half a minute of a steady server; `changed` in units a minute, from the first window on."""
    minutes = number * HALF_MINUTE / 60

    def now(name: str, steady: float) -> float:
        return steady + changed.get(name, 0.0) * minutes

    # As servers do: the first minutes take memory that is kept, and the P99 of a window depends on its requests.
    warming = 40 * math.exp(-minutes)
    p99 = 300 + 40 * math.sin(number % TURN) + (number % 3)
    lane, entry = now("lane", 180 - warming), now("entry", 60)
    return Window(
        at=(number + 1) * HALF_MINUTE,
        seconds=HALF_MINUTE,
        answered=1470,
        failed=round(now("failed", 0)),
        errors={},
        p50=35.0,
        p99=now("p99", p99),
        classes={"interactive": (34.0, p99), "background": (36.0, p99)},
        late_p99=now("late", 4.0),
        entry=now("executions", 40 + 0.1 * (number % 2)),
        lanes=now("executions", 45),
        footprint=Footprint(
            Held(now("server", 150), 170, 200, round(now("descriptors", 80)), round(now("threads", 60)), 0.1 * number),
            Held(lane + entry, 400, 500, round(now("model_descriptors", 120)), 40, 30.0 * number),
            {"encoder_128_0_0": lane, "encode_0_0": entry},
            (1, 2, 3),
            round(now("regions", 8)),
            4.0 * round(now("regions", 8)),
        ),
    )


def windows(**changed: float) -> list[Window]:
    return [window(number, **changed) for number in range(TURN * TURNS)]


def failing(run: list[Window], limits: Limits | None = None) -> list[str]:
    return [line.what for line in judge(run, TURN, limits or Limits()) if not line.holds]


def test_steady_server_holds_though_it_took_memory_at_first() -> None:
    assert failing(windows()) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        # 22 minutes lie between what is compared, and 2 % of 390 MiB are 7.8 MiB.
        ({"server": 0.3}, "memory of the server alone, MiB"),
        ({"entry": 0.3}, "memory of the entry processes alone, MiB"),
        ({"lane": 0.5}, "memory of all, MiB"),
        ({"descriptors": 0.2}, "open files"),
        ({"model_descriptors": 0.2}, "open files"),
        ({"threads": 1.0}, "threads"),
        ({"p99": 4.0}, "P99, median of the windows, ms"),
        ({"p99": -4.0}, "P99, median of the windows, ms"),
        ({"failed": 0.2}, "requests without an answer"),
        ({"late": 1.0}, "generator's own delay, P99, ms"),
    ],
)
def test_drift_is_found_when_it_is_planted(changed: dict[str, float], found: str) -> None:
    assert failing(windows(**changed)) == [found]


@pytest.mark.parametrize("by", [-0.1, 0.1])
def test_executions_a_second_may_neither_fall_nor_rise(by: float) -> None:
    found = ["executions of the entry a second", "executions of the lanes a second"]
    assert failing(windows(executions=by)) == found


def test_one_file_left_in_shared_memory_is_found() -> None:
    assert failing(windows(regions=0.05)) == ["files in shared memory", "shared memory, MiB"]


def test_memory_given_back_is_no_failure() -> None:
    assert failing(windows(lane=-0.5, server=-0.5)) == []


def test_a_model_process_that_was_replaced_is_found() -> None:
    run = windows()
    run[-1] = replace(run[-1], footprint=replace(run[-1].footprint, pids=(1, 2, 9)))
    assert failing(run) == ["model processes that ended"]


def test_nothing_holds_where_nothing_was_answered() -> None:
    dead: dict[str, Any] = {"answered": 0, "failed": 1470, "p99": math.nan, "entry": 0.0, "lanes": 0.0}
    found = failing([replace(each, **dead) for each in windows()])
    assert "P99, median of the windows, ms" in found
    assert "executions of the entry a second" in found
    assert "requests without an answer" in found


def test_part_of_a_turn_and_too_few_turns_are_refused() -> None:
    for number in (2 * TURN, 3 * TURN + 1):
        with pytest.raises(ValueError, match=f"{number} windows"):
            judge(windows()[:number], TURN, Limits())


def test_the_process_that_leaks_is_named_first() -> None:
    grown = growth_by_process(windows(entry=0.3), TURN)
    assert list(grown) == ["encode_0_0", "encoder_128_0_0"]
    assert grown["encode_0_0"] == pytest.approx(0.3 * 22, rel=0.1)


def test_tables_have_a_row_for_each_promise_and_turn() -> None:
    run = windows(entry=0.3)
    lines = judge(run, TURN, Limits())
    rows = list(table(lines))
    assert len(rows) == 2 + len(lines)
    assert sum("FAILS" in row for row in rows) == 1
    assert len({row.count("|") for row in rows}) == 1
    rows = list(turns_table(run, TURN))
    assert len(rows) == 2 + TURNS
    assert "| 0–5 " in rows[2]
    assert "| 25–30 " in rows[-1]


def test_rows_are_json_though_a_window_has_no_answer() -> None:
    text = json.dumps(replace(window(0), p99=math.nan).row(), allow_nan=False)
    assert json.loads(text)["p99"] is None
    assert json.loads(text)["footprint"]["instances"]["encode_0_0"] == 60


def test_a_value_that_is_no_number_does_not_hold() -> None:
    assert not Line("x", 1, 2, math.nan, 1).holds
    assert not Line("x", 1, 2, math.nan, 1, either_way=True).holds
    assert Line("x", 1, 2, -5, 1).holds
    assert not Line("x", 1, 2, -5, 1, either_way=True).holds
