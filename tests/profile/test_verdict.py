"""The three kinds of bottleneck and the rows of the trouble-shooting table."""

from __future__ import annotations

from typing import Any

import pytest

from builders.profile.statistics import difference
from builders.profile.verdict import Observed, judge


def seen(**given: Any) -> Observed:
    return Observed(**{"p50": 100.0, "p99": 150.0, "objective_p99": 400.0, "utilization": 0.5} | given)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, ("none",)),
        ({"p50": 300.0, "p99": 500.0}, ("data supply",)),
        ({"p50": 300.0, "p99": 500.0, "utilization": 0.9}, ("compute",)),
        ({"p50": 50.0}, ("scheduling or allocation",)),
        ({"p50": 50.0, "p99": 500.0, "utilization": 0.9}, ("compute", "scheduling or allocation")),
        ({"p50": 300.0, "p99": 500.0, "utilization": None}, ("none",)),
    ],
)
def test_kind_follows_from_utilisation_and_latency(given: dict[str, Any], kinds: tuple[str, ...]) -> None:
    assert judge(seen(**given)).kinds == kinds


def test_kernel_above_30_percent_is_named() -> None:
    slow = {"p50": 300.0, "p99": 500.0, "utilization": 0.9}
    assert "gelu takes 31%" in judge(seen(**slow, largest_kernel=("gelu", 0.31))).reasons[0]
    assert "gelu" not in judge(seen(**slow, largest_kernel=("gelu", 0.29))).reasons[0]


@pytest.mark.parametrize(
    ("given", "turn"),
    [
        ({"idle_while_preparing": 0.09}, "entry.processes"),
        ({"gap_share": 0.05}, "CUDA graphs"),
        ({"p50": 50.0}, "entry.window_ms"),
        ({"p50": 50.0, "queue_share": 0.6}, "offer less"),
        ({"late_allocations": 3.0}, "engine.arena_factor"),
        ({"graph_hit_rate": 0.8}, "engine.batch_steps"),
        ({"batch_share": 0.2, "queue_share": 0.4}, "lane's batch"),
        ({"short_p99": 20.0, "long_p99": 120.0}, "finer buckets"),
        ({"p50": 300.0, "p99": 500.0, "utilization": 0.9}, "engine.precision"),
    ],
)
def test_row_of_the_table_applies_and_says_what_to_turn(given: dict[str, Any], turn: str) -> None:
    assert any(turn in row.turn for row in judge(seen(**given)).rows)
    assert not judge(seen()).rows


def test_statistics_are_what_happened_between_two_looks() -> None:
    def look(count: int, executions: int, texts: int, nanoseconds: int) -> dict[str, Any]:
        phase = {"count": count, "ns": nanoseconds}
        return {
            "inference_count": texts,
            "execution_count": executions,
            "inference_stats": {"success": {"count": count}, "queue": phase, "compute_infer": phase, "fail": {}},
        }

    found = difference({"encode": look(10, 5, 20, 1_000_000)}, {"encode": look(30, 10, 80, 41_000_000)})["encode"]
    assert (found.requests, found.executions, found.texts, found.failed) == (20, 5, 60, 0)
    assert found.batch == 12
    assert found.phase_ms["queue"] == pytest.approx(2.0)
    assert found.phase_ms["compute_output"] == 0
