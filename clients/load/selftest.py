"""What the generator itself costs: its latency floor and its highest rate, against servers that do nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clients.load.null_server import null_servers
from clients.load.plan import Segment, closed_plan, open_plan
from clients.load.run import LoadOptions, run_load
from clients.load.summary import percentile_of
from clients.load.target import Target
from clients.load.texts import TextSource


@dataclass(frozen=True)
class Floor:
    """The generator's own figures on this machine.

    Attributes:
        rate: offered in the open loop, requests a second.
        p50_ms, p99_ms: latency of that load from the scheduled time.
        late_p99_ms: P99 of the generator's delay in it.
        max_rate: answered requests a second in a closed loop: about the highest rate that can be made here, where the
            servers of this test, one for each process of the generator, share the cores with it.
        processes: of the generator.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    late_p99_ms: float
    max_rate: float
    processes: int

    def text(self) -> str:
        """One line."""
        return (
            f"the generator itself, {self.processes} processes, against servers that do nothing: P50 "
            f"{self.p50_ms:.2f} ms, P99 {self.p99_ms:.2f} ms at {self.rate:g}/s (late by {self.late_p99_ms:.2f} ms, "
            f"P99); at most {self.max_rate:.0f} requests/s"
        )


def measure_floor(processes: int, *, rate: float = 200.0, seconds: float = 3.0, clients: int = 32) -> Floor:
    """Measures the generator for about twice `seconds`.

    Args:
        processes: of the generator.
        rate: of the open loop, requests a second; with `seconds` enough of them for a P99.
        seconds: of each of the two loads.
        clients: of the closed loop, for each process.
    """
    source = TextSource()
    # A server for each process: one alone would be what is measured from the second process on.
    with null_servers(processes) as urls:
        targets = [Target(url) for url in urls]
        opened = run_load(targets, open_plan(source, [Segment(rate, rate, seconds)]), LoadOptions(processes))
        closed = run_load(
            targets, closed_plan(source, 200, seconds), LoadOptions(processes, clients=clients * processes)
        )
    latency, lateness = opened.latency_ms()[opened.ok()], opened.lateness_ms()
    answered = closed.ok() & (np.asarray(closed.done) <= seconds)
    return Floor(
        rate=rate,
        p50_ms=percentile_of(latency, 50),
        p99_ms=percentile_of(latency, 99),
        late_p99_ms=percentile_of(lateness, 99),
        max_rate=float(answered.sum() / seconds),
        processes=processes,
    )
