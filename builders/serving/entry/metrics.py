"""The entry's own Prometheus metrics."""

from __future__ import annotations

import threading
from typing import Any


class Counter:
    """A counter that several threads may raise.

    Two threads in `Metric.increment` at once have brought tritonserver 2.51 down with a segmentation fault in
    `ModelInstanceState::ProcessMetricRequest`: a metric's message to the server is one piece of shared memory.

    Args:
        family: a pb_utils.MetricFamily; kept here, since an increment fails once it is gone.
        labels: label names and values of this counter.
    """

    #: One lock for all counters of the process.
    _lock = threading.Lock()

    def __init__(self, family: Any, labels: dict[str, str]):
        """See the class."""
        self._family = family
        self._metric = family.Metric(labels=labels)

    def add(self, number: float = 1.0) -> None:
        """Raise the counter by `number`."""
        with self._lock:
            self._metric.increment(number)
