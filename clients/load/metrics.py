"""Triton's own metrics, read now and then while a load runs: batch sizes, the queue, what each lane computes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Self

from clients.errors import ServerUnavailable
from clients.status import check_metrics_url, fetch_metrics, samples

INFERENCES = "nv_inference_count"
EXECUTIONS = "nv_inference_exec_count"
PENDING = "nv_inference_pending_request_count"
GPU = "nv_gpu_utilization"
_WANTED = (INFERENCES, EXECUTIONS, PENDING, GPU)
#: Inferences, executions and seconds between two readings -> a figure.
_Figure = Callable[[float, float, float], float]
_PAGE_S = 2.0


@dataclass(frozen=True)
class Reading:
    """The metrics at one time.

    Attributes:
        at: seconds from the start of the sampling.
        values: metric -> model (or GPU) -> value.
    """

    at: float
    values: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Series:
    """A figure over time: `at` seconds, one list of values of the same length per name."""

    at: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)


def parse_metrics(page: str) -> dict[str, dict[str, float]]:
    """The wanted metrics of a Prometheus page: metric -> model -> value, versions and other labels added up.

    What is no number (a GPU that does not tell its utilisation is NaN) is left out.
    """
    values: dict[str, dict[str, float]] = {}
    for metric, labels, value in samples(page):
        if metric in _WANTED and math.isfinite(value):
            name = labels.get("model") or labels.get("gpu_uuid") or "all"
            of_metric = values.setdefault(metric, {})
            of_metric[name] = of_metric.get(name, 0.0) + value
    return values


class MetricsSampler:
    """Reads a metrics page every `interval` seconds in a thread, inside a `with` block.

    Args:
        url: the page, for example http://127.0.0.1:8002/metrics.
        interval: seconds between two readings.

    Attributes:
        readings: so far. A reading that fails is left out: metrics must not end a load run.
        began: when the sampling started, on the clock of time.monotonic.

    Raises:
        InvalidInput: the address is no HTTP address.
    """

    def __init__(self, url: str, interval: float = 0.5):
        """See the class."""
        self.readings: list[Reading] = []
        self.began = 0.0
        self._url, self._interval = check_metrics_url(url), interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Self:
        """Starts to read."""
        self.began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                page = fetch_metrics(self._url, _PAGE_S)
            except ServerUnavailable:
                pass
            else:
                self.readings.append(Reading(time.monotonic() - self.began, parse_metrics(page)))
            self._stop.wait(self._interval)

    def since(self, moment: float) -> tuple[Reading, ...]:
        """The readings from a moment of time.monotonic on, their times counted from it."""
        shift = moment - self.began
        return tuple(replace(one, at=one.at - shift) for one in self.readings if one.at >= shift)


def batch_sizes(readings: Sequence[Reading]) -> Series:
    """Texts per execution of each model between two readings; NaN where nothing ran."""
    return _changes(readings, lambda inferences, executions, _: inferences / executions if executions else math.nan)


def rates(readings: Sequence[Reading]) -> Series:
    """Texts a second of each model between two readings."""
    return _changes(readings, lambda inferences, _, seconds: inferences / seconds)


def pending(readings: Sequence[Reading]) -> Series:
    """Requests that wait in the queue of each model."""
    names = sorted({name for reading in readings for name in reading.values.get(PENDING, {})})
    values = {name: [reading.values.get(PENDING, {}).get(name, 0.0) for reading in readings] for name in names}
    return Series([reading.at for reading in readings], values)


def gpu_utilisation(readings: Sequence[Reading]) -> float | None:
    """Mean of all GPUs and readings, share of 1; None where Triton sees no GPU."""
    seen = [value for reading in readings for value in reading.values.get(GPU, {}).values()]
    return sum(seen) / len(seen) if seen else None


def _changes(readings: Sequence[Reading], figure: _Figure) -> Series:
    names = sorted({name for reading in readings for name in reading.values.get(INFERENCES, {})})
    series = Series(values={name: [] for name in names})
    for before, after in pairwise(readings):
        series.at.append(after.at)
        for name in names:
            change = [
                after.values.get(metric, {}).get(name, 0.0) - before.values.get(metric, {}).get(name, 0.0)
                for metric in (INFERENCES, EXECUTIONS)
            ]
            # Counters begin anew with a server that was started again.
            lost = min(change) < 0
            series.values[name].append(math.nan if lost else figure(change[0], change[1], after.at - before.at))
    return series
