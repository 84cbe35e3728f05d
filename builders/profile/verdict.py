"""Which kind of bottleneck it is, which rows of the trouble-shooting table apply, and what to turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["data supply", "compute", "scheduling or allocation", "none"]

HIGH_KERNEL = 0.30
"""Share of the kernels' time above which one kernel is worth working on."""
HIGH_PREPARING = 0.08
"""Share of the entry's time, and of the wall time with an idle engine, above which preparing texts is too slow."""
HIGH_GAPS = 0.04
"""Share of a batch's time between its kernels above which they are launched too slowly."""
WIDE = 2.0
"""P99 over P50 above which latency is not smooth."""
HIT_RATE = 0.90
"""Share of the batches that run as a CUDA graph below which the steps do not fit."""


@dataclass(frozen=True)
class Observed:
    """What a profile found; None is not known. Times in milliseconds, shares of 1."""

    p50: float
    p99: float
    objective_p99: float
    utilization: float | None = None
    """Share of the time in which the GPU (or, without one, some bucket's engine) was at work."""
    objective_utilization: float = 0.70
    idle_while_preparing: float | None = None
    preparing: float | None = None
    """Decode, tokenise and group as a share of the entry's time."""
    queue_share: float | None = None
    """Waiting in the entry's queue as a share of a request's time."""
    batch_share: float | None = None
    """Average batch over the largest one, of the busiest bucket."""
    largest_kernel: tuple[str, float] | None = None
    gap_share: float | None = None
    late_allocations: float | None = None
    graph_hit_rate: float | None = None
    long_p99: float | None = None
    """P99 of the longest class of texts."""
    short_p99: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of the trouble-shooting table that applies."""

    symptom: str
    cause: str
    seen: str
    turn: str


@dataclass(frozen=True)
class Verdict:
    """The kinds of bottleneck, the most telling first, and what to do."""

    kinds: tuple[Kind, ...]
    reasons: tuple[str, ...]
    rows: tuple[Row, ...] = field(default=())


def judge(seen: Observed) -> Verdict:
    """The three kinds of the reference case, then its table."""
    kinds: list[Kind] = []
    reasons = []
    busy = seen.utilization is not None and seen.utilization >= seen.objective_utilization
    slow = seen.p99 > seen.objective_p99
    if slow and seen.utilization is not None and not busy:
        kinds.append("data supply")
        reasons.append(
            f"utilisation {seen.utilization:.0%} is below {seen.objective_utilization:.0%} and P99 {seen.p99:.0f} ms "
            f"above {seen.objective_p99:.0f} ms: the engine waits for work"
        )
    if slow and busy:
        kinds.append("compute")
        kernel = seen.largest_kernel
        named = f"; {kernel[0][:60]} takes {kernel[1]:.0%}" if kernel and kernel[1] > HIGH_KERNEL else ""
        reasons.append(f"utilisation {seen.utilization:.0%} and P99 {seen.p99:.0f} ms are both high{named}")
    if seen.p99 > WIDE * seen.p50:
        kinds.append("scheduling or allocation")
        reasons.append(f"P99 {seen.p99:.1f} ms is {seen.p99 / max(seen.p50, 1e-9):.1f} times P50 {seen.p50:.1f} ms")
    if not kinds:
        kinds.append("none")
        reasons.append(f"P99 {seen.p99:.0f} ms is within {seen.objective_p99:.0f} ms and within {WIDE:g} times P50")
    return Verdict(tuple(kinds), tuple(reasons), tuple(row for rule in _TABLE for row in rule(seen)))


def _supply(seen: Observed) -> list[Row]:
    rows = []
    if (seen.idle_while_preparing or 0) > HIGH_PREPARING:
        rows.append(
            Row(
                "low utilisation", "data supply",
                f"engine idle while texts are prepared: {seen.idle_while_preparing:.1%} of the time",
                "raise entry.processes (IPC eats the gain beyond the cores), then entry.tokenizer_threads",
            )
        )  # fmt: skip
    if (seen.gap_share or 0) > HIGH_GAPS:
        rows.append(
            Row(
                "low utilisation", "data supply", f"gaps between kernels: {seen.gap_share:.1%} of a batch",
                "turn CUDA graphs on (engine.techniques; natively they are)",
            )
        )  # fmt: skip
    return rows


def _swings(seen: Observed) -> list[Row]:
    if seen.p99 <= WIDE * seen.p50:
        return []
    why = f"P99 {seen.p99:.1f} ms, P50 {seen.p50:.1f} ms"
    rows = [
        Row(
            "P99 swings",
            "scheduling",
            why,
            "lower entry.window_ms and lanes.*.batch, one at a time; then lanes.short.late_from",
        )
    ]
    if seen.queue_share is not None and seen.queue_share > 0.5:
        rows.append(
            Row(
                "P99 swings", "scheduling", f"{seen.queue_share:.0%} of a request's time is in the entry's queue",
                "offer less, or raise entry.processes; the queue's limits are entry.interactive and entry.background",
            )
        )  # fmt: skip
    return rows


def _memory(seen: Observed) -> list[Row]:
    if not seen.late_allocations:
        return []
    return [
        Row(
            "out of GPU memory, P99 swings", "pool too small",
            f"{seen.late_allocations:.0f} allocations after the lanes were ready",
            "turn the arena on (engine.techniques), raise engine.arena_factor",
        )
    ]  # fmt: skip


def _graphs(seen: Observed) -> list[Row]:
    if seen.graph_hit_rate is None or seen.graph_hit_rate >= HIT_RATE:
        return []
    return [
        Row(
            "latency rose after a change", "pool and graph misses",
            f"{seen.graph_hit_rate:.0%} of the batches ran as a graph",
            "let engine.batch_steps reach the lanes' largest batch",
        )
    ]  # fmt: skip


def _batches(seen: Observed) -> list[Row]:
    if seen.batch_share is None or seen.batch_share >= 0.5 or seen.queue_share is None or seen.queue_share < 0.3:
        return []
    return [
        Row(
            "throughput stuck", "batches too small", f"average batch {seen.batch_share:.0%} of the largest",
            "raise entry.window_ms or the lane's batch",
        )
    ]  # fmt: skip


def _long(seen: Observed) -> list[Row]:
    if seen.long_p99 is None or seen.short_p99 is None or seen.long_p99 <= 5 * seen.short_p99:
        return []
    return [
        Row(
            "long texts slow", "buckets or lanes", f"P99 of the longest class {seen.long_p99:.0f} ms, of the shortest "
            f"{seen.short_p99:.0f} ms", "finer buckets, lanes.short.up_to, lanes.long.workers",
        )
    ]  # fmt: skip


def _compute(seen: Observed) -> list[Row]:
    if seen.utilization is None or seen.utilization < seen.objective_utilization or seen.p99 <= seen.objective_p99:
        return []
    return [
        Row(
            "both high", "compute", f"utilisation {seen.utilization:.0%}",
            "a lighter model, FP16 or BF16 (engine.precision), a newer TensorRT with fused attention, more GPUs",
        )
    ]  # fmt: skip


_TABLE: tuple[Callable[[Observed], list[Row]], ...] = (_supply, _swings, _memory, _graphs, _batches, _long, _compute)
