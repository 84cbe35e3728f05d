"""Kernels and copies of a batch on the GPU, by CUPTI inside the engine's own process.

Needs cupti-python and an `nvidia-cuda-cupti` of the driver's CUDA version; runs under Python 3.10, too.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from builders.errors import BuilderError

_BUFFER = 8 << 20


@dataclass(frozen=True)
class Activity:
    """One kernel or copy: its name and when it ran, nanoseconds of CUPTI's clock."""

    name: str
    begin: int
    end: int
    copy: bool = False


@dataclass(frozen=True)
class BatchKernels:
    """What the GPU did in batches of one size; all times are medians over the batches, milliseconds.

    Attributes:
        batches: how many were recorded.
        kernels: of a batch.
        copies: of a batch.
        span_ms: from the beginning of the first kernel to the end of the last one.
        busy_ms: of it, time in which a kernel ran.
        gap_share: the rest of it, as a share of the span.
        largest: the kernels that take most, with their share of the busy time.
    """

    batches: int
    kernels: int
    copies: int
    span_ms: float
    busy_ms: float
    gap_share: float
    largest: tuple[tuple[str, float], ...]


class KernelRecorder:
    """CUPTI's activity records of this process.

    Raises:
        BuilderError: cupti-python is missing, or CUPTI refuses this machine.
    """

    def __init__(self) -> None:
        """See the class."""
        try:
            self._cupti: Any = importlib.import_module("cupti.cupti")  # not an attribute: the package imports nothing
        except (ImportError, AttributeError, RuntimeError) as error:
            raise BuilderError(
                f"kernels cannot be recorded: {error}",
                remedy="pip install cupti-python nvidia-cuda-cupti, both of the CUDA version that nvidia-smi shows",
            ) from error
        self._found: list[Activity] = []
        kinds = self._cupti.ActivityKind
        self._copies = {int(kinds.MEMCPY)}
        try:
            self._cupti.activity_register_callbacks(lambda: (_BUFFER, 0), self._keep)
            for kind in (kinds.CONCURRENT_KERNEL, kinds.MEMCPY):
                self._cupti.activity_enable(kind)
        except Exception as error:  # CUPTI's own, which has no class of its own in all releases
            raise BuilderError(f"CUPTI refuses: {error}", remedy="use a machine that lets profilers in") from error

    def _keep(self, records: Iterable[Any]) -> None:
        for record in records:
            copy = int(record.kind) in self._copies
            self._found.append(Activity("copy" if copy else str(record.name), int(record.start), int(record.end), copy))

    def record(self, run: Callable[[], object]) -> list[Activity]:
        """What the GPU did for one `run`, in the order of its beginning; `run` waits until it is done."""
        self._cupti.activity_flush_all(1)
        self._found.clear()
        run()
        self._cupti.activity_flush_all(1)
        return sorted(self._found, key=lambda part: part.begin)

    def close(self) -> None:
        """Record no more."""
        kinds = self._cupti.ActivityKind
        for kind in (kinds.CONCURRENT_KERNEL, kinds.MEMCPY):
            self._cupti.activity_disable(kind)


def summarise(batches: Sequence[Sequence[Activity]]) -> BatchKernels:
    """What batches of one size have in common.

    Raises:
        BuilderError: no kernel was recorded.
    """
    rows: list[tuple[float, ...]] = []
    names: Counter[str] = Counter()
    for batch in batches:
        kernels = sorted((part for part in batch if not part.copy), key=lambda part: part.begin)
        if not kernels:
            continue
        busy = covered((part.begin, part.end) for part in kernels)
        span = max(part.end for part in kernels) - kernels[0].begin
        rows.append((len(kernels), len(batch) - len(kernels), span, busy))
        for part in kernels:
            names[part.name] += part.end - part.begin
    if not rows:
        raise BuilderError("no kernel was recorded", remedy="run a batch while the recorder is on")
    middle = [_median([row[place] for row in rows]) for place in range(4)]
    whole = sum(names.values())
    largest = tuple((name, taken / whole) for name, taken in names.most_common(8))
    share = _median([1 - row[3] / row[2] for row in rows])
    kernels_each, copies_each = int(middle[0]), int(middle[1])
    return BatchKernels(len(rows), kernels_each, copies_each, middle[2] / 1e6, middle[3] / 1e6, share, largest)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
