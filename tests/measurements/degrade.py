"""Small batches under backlog: what they give and what they cost while a backlog drains (docs/reliability.md).

`python -m tests.measurements.degrade` sends a backlog of some seconds at once, and interactive requests beside it, to
the same server with `entry.degrade` off and on, in turn. Nothing is promised of the figures: they say whether it should
be turned on for such lanes. Exit code 1 when a request was lost, or when it was on and never switched.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builders.ports import free_ports
from builders.server import TritonServer
from tests.texts import mixed_texts
from tests.tools.load import Call, closed_loop, open_loop, percentile_ms
from tests.tools.metrics import counter
from tests.tools.promises import Promise, markdown, print_promises
from tests.tools.repositories import repository, timed_repository

HEADER = ["degrade", "first ms", "P50 ms", "P99 ms", "interactive P50 ms", "P99 ms", "texts/s", "failed", "switches"]
TEXTS = [text for text in mixed_texts(600, seed=8) if len(text) < 1500]


@dataclass(frozen=True)
class Drain:
    """One backlog: times in milliseconds, texts a second, switches to small batches of all processes."""

    first: float
    p50: float
    p99: float
    interactive_p50: float
    interactive_p99: float
    throughput: float
    failed: float
    switches: float


def main() -> None:
    """Print a row for each drain, the medians of both ways, and what the one gains and costs by the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["timed", "cpu"], default="timed", help="lanes of known time, or real ones")
    parser.add_argument("--service-ms", type=float, default=10, help="of a timed batch")
    parser.add_argument("--per-text-ms", type=float, default=2, help="more for each text of it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="texts of a small batch")
    parser.add_argument("--above", type=int, default=128, help="waiting requests; half of it to go back")
    parser.add_argument("--seconds", "--backlog", dest="backlog", type=float, default=10, help="of work in the backlog")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    drains: list[tuple[bool, Drain]] = []
    rate = 0.0
    for number in range(options.rounds):
        for enabled in (False, True):
            drain, rate = _drain(options, enabled, rate)
            drains.append((enabled, drain))
            print(f"round {number + 1}, degrade {', '.join(_row('on' if enabled else 'off', drain))}", flush=True)
    off, on = (_middle([drain for own, drain in drains if own is enabled]) for enabled in (False, True))
    engine = (
        f"{options.service_ms:g} ms + {options.per_text_ms:g} ms a text" if options.engine == "timed" else "a CPU's"
    )
    print(
        f"\nEngine: {engine}; at most {rate:.0f} texts/s; {rate * options.backlog:.0f} texts at once; small batches of "
        f"{options.batch} above {options.above} waiting requests; {options.processes} processes\n"
    )
    rows = [_row("on" if enabled else "off", drain) for enabled, drain in drains]
    rows += [_row("off, median", off), _row("on, median", on)]
    for line in markdown(HEADER, rows):
        print(line)
    lost = sum(drain.failed for _, drain in drains)
    asleep = sum(drain.switches == 0 for enabled, drain in drains if enabled)
    held = print_promises(
        [
            Promise("time to the first answer, on by off", on.first / off.first, None, "×"),
            Promise("P50 of the backlog, on by off", on.p50 / off.p50, None, "×"),
            Promise("P99 of the backlog, on by off", on.p99 / off.p99, None, "×"),
            Promise(
                "P50 of interactive requests meanwhile, on by off", on.interactive_p50 / off.interactive_p50, None, "×"
            ),
            Promise(
                "P99 of interactive requests meanwhile, on by off", on.interactive_p99 / off.interactive_p99, None, "×"
            ),
            Promise("throughput given up", 100 * (1 - on.throughput / off.throughput), None, "%"),
            Promise("requests without an answer", lost, 0),
            Promise("drains in which it was on and did not switch", asleep, 0),
        ]
    )
    sys.exit(0 if held else 1)


def _middle(drains: list[Drain]) -> Drain:
    return Drain(*np.median(np.array([astuple(drain) for drain in drains]), axis=0).tolist())


def _row(name: str, drain: Drain) -> list[str]:
    times = (drain.first, drain.p50, drain.p99, drain.interactive_p50, drain.interactive_p99)
    counts = (f"{drain.throughput:.1f}", f"{drain.failed:.0f}", f"{drain.switches:.0f}")
    return [name, *(f"{value:.0f}" for value in times), *counts]


def _drain(options: argparse.Namespace, enabled: bool, rate: float) -> tuple[Drain, float]:
    """One backlog on a fresh server; `rate` is what the first server did at its most, 0 where that is not known."""
    ports = free_ports()
    level = {"timeout_ms": 120_000, "queue_size": 100_000}
    url = f"http://127.0.0.1:{ports.metrics}/metrics"
    entry = {
        "processes": options.processes,
        "interactive": level,
        "background": level,
        "degrade": {
            "enabled": enabled,
            "above": options.above,
            "below": options.above // 2,
            "batch": options.batch,
            "metrics_url": url,
        },
    }
    settings: dict[str, Any] = {
        "entry": entry,
        "lanes": {"short": {"batch": 32, "late_from": None}},
        "engine": {"max_batch": 32, "max_batch_tokens": 16_384},
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "timed":
            built = timed_repository(
                Path(folder), options.service_ms / 1000, per_text_s=options.per_text_ms / 1000, **settings
            )
        else:
            built = repository(Path(folder), **settings)
        with TritonServer(built.repository, built.models, ports=ports) as server:
            samples, took = closed_loop(server.grpc_url, [Call((text,)) for text in TEXTS], clients=96)
            rate = rate or len(samples) / took
            return _measure(server, rate, options.backlog), rate


def _measure(server: TritonServer, rate: float, seconds: float) -> Drain:
    texts = round(rate * seconds)
    calls = [Call((TEXTS[n % len(TEXTS)],), {"priority": 2}, kind="backlog") for n in range(texts)]
    asked = np.arange(1.0, seconds, 0.1)
    interactive = {"priority": 1, "parameters": {"class": "interactive"}}
    calls += [Call((TEXTS[n],), interactive, at=float(at), kind="now") for n, at in enumerate(asked)]
    began = time.perf_counter()
    samples = open_loop(server.grpc_url, calls)
    took = time.perf_counter() - began
    backlog = [sample for sample in samples if sample.call.kind == "backlog"]
    now = [sample for sample in samples if sample.call.kind == "now"]
    time.sleep(1.5)  # counts are told once a second
    return Drain(
        first=1000 * min(sample.latency for sample in backlog if not sample.error),
        p50=percentile_ms(backlog, 50),
        p99=percentile_ms(backlog, 99),
        interactive_p50=percentile_ms(now, 50),
        interactive_p99=percentile_ms(now, 99),
        throughput=len(samples) / took,
        failed=sum(sample.error is not None for sample in samples),
        switches=counter(server.metrics_url, "encoder_lanes_degrade_switches_total", to="small"),
    )


if __name__ == "__main__":
    main()
