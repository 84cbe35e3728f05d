"""The stop line: the objectives of the settings against what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from builders.bench.result import BenchResult, Row
from builders.settings.sections import ObjectiveSettings

Held = Literal["held", "passed over", "not judged"]
#: A P99 of fewer requests has fewer than five beyond it: no interval makes a judgement of it.
ENOUGH_FOR_P99 = 500


@dataclass(frozen=True)
class LineCheck:
    """One objective.

    Attributes:
        objective: its name and limit.
        measured: the figure, in words.
        held: "passed over" fails the bench; "not judged" says in `measured` why.
    """

    objective: str
    measured: str
    held: Held

    def text(self) -> str:
        """One line."""
        return f"{self.objective}: {self.measured}: {self.held}"


def check_line(result: BenchResult, driver: str, objectives: ObjectiveSettings) -> list[LineCheck]:
    """P99 at the objective's rate, and GPU utilisation at maximum load where there is a GPU and an objective for it.

    Accuracy has a gate of its own (`verify`).

    Args:
        result: of the bench.
        driver: name of the product in it.
        objectives: of its settings.
    """
    return [_p99(result, driver, objectives), *_gpu(result, driver, objectives)]


def p99_with_failures(rows: list[Row]) -> float:
    """P99 of all rounds together, each failed request infinitely slow, milliseconds."""
    values = [latency for row in rows for latency in row.latencies] + [math.inf] * sum(row.failed for row in rows)
    return float(np.percentile(values, 99, method="higher")) if values else math.inf


def _p99(result: BenchResult, driver: str, objectives: ObjectiveSettings) -> LineCheck:
    rows, rate = result.of(driver, "open"), result.load.rate
    objective = f"P99 at {objectives.rate:g} texts/s at most {objectives.p99_ms:g} ms"
    if rate < objectives.rate:
        return LineCheck(objective, f"the load was {rate:g} texts/s only", "not judged")
    if not rows or not all(row.valid for row in rows):
        return LineCheck(objective, "the generator was late, or nothing was measured", "not judged")
    p99 = p99_with_failures(rows)
    failed = sum(row.failed for row in rows)
    words = f"{p99:.0f} ms" if math.isfinite(p99) else "more than 1 % of the requests failed"
    words += f" at {rate:g} texts/s" if rate > objectives.rate else ""
    words += f", {failed} failed" if failed else ""
    count = failed + sum(len(row.latencies) for row in rows)
    words += f", of {count} requests only" if count < ENOUGH_FOR_P99 else ""
    if p99 <= objectives.p99_ms:  # at a higher rate all the more
        return LineCheck(objective, words, "held")
    return LineCheck(objective, words, "passed over" if rate == objectives.rate else "not judged")


def _gpu(result: BenchResult, driver: str, objectives: ObjectiveSettings) -> list[LineCheck]:
    limit = objectives.gpu_utilization
    if limit is None:
        return []
    objective = f"GPU utilisation at maximum load at least {100 * limit:g} %"
    seen = [row.gpu for row in result.of(driver, "closed") if row.gpu is not None]
    if not seen:
        return [LineCheck(objective, "no GPU is seen", "not judged")]
    mean = sum(seen) / len(seen)
    return [LineCheck(objective, f"{100 * mean:.0f} %", "held" if mean >= limit else "passed over")]
