"""The lane's own Prometheus metrics, told to Triton once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "encoder_lanes_engine_"

#: Name (what ends in _total only rises) and meaning.
METRICS = {
    "arena_bytes": "Device memory of the lane's arena, allocated at start",
    "arena_peak_bytes": "Most of the arena that was in use",
    "device_bytes": "Device memory that the lane holds by its own account, the plan's weights included",
    "late_allocations_total": "Allocations of device memory after the lane was ready",
    "graph_hits_total": "Batches that ran as a CUDA graph",
    "graph_misses_total": "Batches that were launched kernel by kernel",
    "copies_total": "Copies between host and GPU",
    "batches_total": "Batches computed",
    "rows_total": "Texts computed",
    "padded_rows_total": "Rows added to reach a batch step",
    "failed_batches_total": "Batches that failed",
    "staging_seconds_total": "Time in which the host wrote batches and started them",
    "broken": "1 when the GPU context is broken and the lane refuses everything",
}


class LaneMetrics:
    """Gauges and counters of an engine.

    One thread alone touches them: two in `Metric.increment` at once have brought tritonserver 2.51 down, and each call
    is a message to the server, which no batch should wait for.

    Args:
        pb_utils: Triton's module.
        labels: of all metrics.
        read: gives the values by name, those that rise since the start.
        warn: told what failed.
    """

    def __init__(
        self,
        pb_utils: Any,
        labels: Mapping[str, str],
        read: Callable[[], Mapping[str, float]],
        warn: Callable[[str], None],
    ):
        """See the class."""
        self._read, self._warn = read, warn
        self._told: dict[str, float] = {}
        self._families, self._metrics = {}, {}
        for name, about in METRICS.items():
            rises = name.endswith("_total")
            kind = pb_utils.MetricFamily.COUNTER if rises else pb_utils.MetricFamily.GAUGE
            # Kept: an increment fails once the family is gone.
            self._families[name] = pb_utils.MetricFamily(name=PREFIX + name, description=about, kind=kind)
            self._metrics[name] = self._families[name].Metric(labels=dict(labels))
        #: Held while Triton is told.
        self.telling = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lane-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the last values and end."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        # Not at once: `initialize` may still be telling the server something.
        last = self._stop.wait(1.0)
        while True:
            try:
                with self.telling:
                    self._tell()
            except Exception as error:  # metrics must not end a lane
                self._warn(f"the lane's metrics could not be told: {error}")
                return
            if last:
                return
            last = self._stop.wait(1.0)

    def _tell(self) -> None:
        for name, value in self._read().items():
            before = self._told.get(name, 0.0)
            if value == before:
                continue
            if name.endswith("_total"):
                self._metrics[name].increment(value - before)
            else:
                self._metrics[name].set(value)
            self._told[name] = value
