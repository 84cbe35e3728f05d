"""Bursts followed by silence: does the batcher fall asleep with work in its queue (docs/queue.md)?

`python -m tests.measurements.bursts` runs the same bursts with the wake-up and without it, side by side.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builders.ports import free_ports
from builders.server import TritonServer
from tests.tools.load import Call, open_loop
from tests.tools.metrics import counter
from tests.tools.repositories import timed_repository

#: Texts of a batch in the lanes of these servers.
LANE_BATCH = 8


@dataclass(frozen=True)
class Bursts:
    """What bursts took.

    Attributes:
        seconds: from a burst's start to its last answer, per burst.
        least: seconds that the lanes need for a burst when they never wait.
        errors: requests without an answer, of all.
        wakeups: sent by the entry, over all.
    """

    seconds: list[float]
    least: float
    errors: int
    wakeups: float

    @property
    def stalled(self) -> int:
        """Bursts that took a quarter of a second longer than the fastest.

        Where all of them stall, so does the fastest: it counts for twice what the lanes need at most.
        """
        usual = min(min(self.seconds), 2 * self.least)
        return sum(seconds > usual + 0.25 for seconds in self.seconds)


def run_bursts(
    folder: Path, *, wake_after_ms: float, bursts: int, size: int = 150, processes: int = 2, service_s: float = 0.02
) -> Bursts:
    """Send bursts of `size` requests, each after silence, to lanes of a known service time."""
    level = {"timeout_ms": 60_000, "queue_size": 10_000}
    entry = {"processes": processes, "wake_after_ms": wake_after_ms, "interactive": level, "background": level}
    lanes = {"short": {"batch": LANE_BATCH}}
    built = timed_repository(folder, service_s, entry=entry, lanes=lanes)
    seconds, errors = [], 0
    with TritonServer(built.repository, built.models, ports=free_ports()) as server:
        open_loop(server.grpc_url, [Call(("first",)) for _ in range(64)])
        for _ in range(bursts):
            time.sleep(0.3)
            samples = open_loop(server.grpc_url, [Call((f"text {number}",)) for number in range(size)])
            seconds.append(max(sample.latency for sample in samples))
            errors += sum(sample.error is not None for sample in samples)
        time.sleep(1.5)  # counts are told once a second
        wakeups = counter(server.metrics_url, "encoder_lanes_wakeups_total")
    return Bursts(seconds, math.ceil(size / LANE_BATCH) * service_s, errors, wakeups)


def main() -> None:
    """Print a row with the cure and one without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=40)
    parser.add_argument("--size", type=int, default=150)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 1])
    options = parser.parse_args()
    print("processes  wake-up  median ms  longest ms  stalled (> fastest + 250 ms)  errors  wake-ups")
    for processes in options.processes:
        for wake in (2.0, 0.0, 2.0, 0.0):
            with tempfile.TemporaryDirectory() as folder:
                result = run_bursts(
                    Path(folder), wake_after_ms=wake, bursts=options.bursts, size=options.size, processes=processes
                )
            median = float(np.median(result.seconds))
            print(
                f"{processes:9}  {'on' if wake else 'off':7}  {median * 1000:9.0f}  {max(result.seconds) * 1000:10.0f}"
                f"  {result.stalled:6} of {options.bursts:3}  {result.errors:25}  {result.wakeups:8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
