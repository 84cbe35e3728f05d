"""Overload with two levels: does interactive hold, and does background take the rest (docs/reliability.md)?

`python -m tests.measurements.priority` finds the most the server does, then sends 20 % interactive and 80 % background
three times: at half of it, at 1.5 times with two levels, and at 1.5 times with all requests in one level. It does so
with lanes of two shapes:

* `production`: a batch of the entry is one call of a bucket and answered as a whole, as in `deploy.yaml`. The promise
  is made for this one, and the exit code goes by it.
* `cpu`: the buckets of `deploy.cpu.yaml`, whose longer texts leave their batch and are answered late. What has left is
  in a lane's queue, which knows no priority, so an interactive text waits for it: told, and not promised.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builders.ports import free_ports
from builders.server import TritonServer
from tests.texts import mixed_texts
from tests.tools.load import Call, Sample, closed_loop, open_loop, percentile_ms, poisson
from tests.tools.memory import MemoryWatch
from tests.tools.promises import Promise, markdown, print_promises
from tests.tools.repositories import repository, timed_repository

TEXTS = mixed_texts(400, seed=7)
SHAPES: dict[str, dict[str, Any]] = {
    "production": {
        "lanes": {"short": {"batch": 32, "late_from": None}},
        "engine": {"max_batch": 32, "max_batch_tokens": 16_384},
    },
    "cpu": {},
}
#: Memory that an overload may take on top, MiB: full queues of requests of a few kB each, and their answers.
MEMORY_MIB = 256.0


@dataclass(frozen=True)
class Run:
    """What one load gave.

    Attributes:
        name: of the run.
        rate: offered, requests a second.
        parts: the requests of each level.
        seconds: of the load.
    """

    name: str
    rate: float
    parts: dict[str, list[Sample]]
    seconds: float

    def answered(self, kind: str) -> float:
        """Answers a second while the load went on; what drains afterwards does not count."""
        in_time = [one for one in self.parts[kind] if not one.error and one.call.at + one.latency <= self.seconds]
        return len(in_time) / self.seconds

    @property
    def throughput(self) -> float:
        """Answers a second of both levels."""
        return sum(self.answered(kind) for kind in self.parts)

    @property
    def interactive_p99(self) -> float:
        """Milliseconds, of the answered ones."""
        return percentile_ms(self.parts["interactive"], 99)

    @property
    def interactive_failed(self) -> float:
        """Share of 1."""
        own = self.parts["interactive"]
        return sum(sample.error is not None for sample in own) / max(1, len(own))

    def rows(self) -> list[list[str]]:
        """A row for each level."""
        rows = []
        for kind, own in self.parts.items():
            errors = Counter((sample.error or "").split("] ")[-1][:40] for sample in own if sample.error)
            rows.append(
                [
                    f"{self.name}, {self.rate:.0f}/s",
                    kind,
                    str(len(own)),
                    f"{self.answered(kind):.1f}",
                    f"{percentile_ms(own, 50):.0f}",
                    f"{percentile_ms(own, 99):.0f}",
                    ", ".join(f"{count} {error}" for error, count in errors.most_common()) or "0",
                ]
            )
        return rows


def main() -> None:
    """Print the runs and whether the promises hold; exit code 1 when one of the production shape does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["timed", "cpu"], default="timed", help="lanes of known time, or real ones")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--service-ms", type=float, default=60, help="of a timed batch")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--interactive-timeout-ms", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=40, help="of each run")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    held = [_shape(name, options) for name in options.shapes]
    sys.exit(0 if all(held) else 1)


def _shape(name: str, options: argparse.Namespace) -> bool:
    entry = {
        "processes": options.processes,
        "interactive": {"timeout_ms": options.interactive_timeout_ms, "queue_size": 1024},
        "background": {"timeout_ms": 5000, "queue_size": 8192},
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "timed":
            built = timed_repository(Path(folder), options.service_ms / 1000, entry=entry, **SHAPES[name])
        else:
            built = repository(Path(folder), entry=entry, **SHAPES[name])
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            held = [_round(server, name, options) for _ in range(options.rounds)]
    return all(held)


def _round(server: TritonServer, shape: str, options: argparse.Namespace) -> bool:
    seconds = options.seconds
    most = _maximum(server.grpc_url, min(10.0, seconds))
    engine = f"batches of {options.service_ms:g} ms" if options.engine == "timed" else "real engines"
    print(f"\nShape {shape}, {engine}; maximum {most:.0f} texts/s (closed loop, 64 clients)\n")
    with MemoryWatch(server.pid or 0) as watch:
        half = _load("50 %, two levels", server.grpc_url, 0.5 * most, seconds, interactive=1)
        two = _load("150 %, two levels", server.grpc_url, 1.5 * most, seconds, interactive=1)
        one = _load("150 %, one level", server.grpc_url, 1.5 * most, seconds, interactive=2)
    header = ["load", "level", "sent", "answered/s", "P50 ms", "P99 ms", "failed"]
    for line in markdown(header, [row for run in (half, two, one) for row in run.rows()]):
        print(line)
    server_mib, models_mib = watch.growth()
    promises = [
        ("interactive P99 at 150 % by that at 50 %", two.interactive_p99 / half.interactive_p99, 2.5, "×"),
        ("interactive P99 with two levels by that with one", two.interactive_p99 / one.interactive_p99, 0.5, "×"),
        ("interactive requests failed at 150 %", 100 * two.interactive_failed, 1.0, "%"),
        ("throughput that two levels give up", 100 * (1 - two.throughput / one.throughput), 10.0, "%"),
        ("memory of the server, most above its first", server_mib, MEMORY_MIB, "MiB"),
        ("memory of the model processes, the same", models_mib, MEMORY_MIB, "MiB"),
    ]
    promised = shape == "production"
    held = print_promises(
        [Promise(what, value, limit if promised else None, unit) for what, value, limit, unit in promises]
    )
    print(f"\n{watch.text()}", flush=True)
    return held


def _maximum(url: str, seconds: float) -> float:
    texts, rates = 500, [0.0]
    while sum(texts / rate for rate in rates[1:]) < seconds:
        samples, took = closed_loop(url, [Call((TEXTS[n % len(TEXTS)],)) for n in range(texts)], clients=64)
        failed = [sample.error for sample in samples if sample.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        rates.append(texts / took)
    return float(np.median(rates[1:]))


def _load(name: str, url: str, rate: float, seconds: float, interactive: int) -> Run:
    calls = []
    chance = np.random.default_rng(3)
    for number, at in enumerate(poisson(rate, seconds, seed=11)):
        kind = "interactive" if chance.random() < 0.2 else "background"
        level = interactive if kind == "interactive" else 2
        calls.append(Call((TEXTS[number % len(TEXTS)],), {"priority": level}, at=at, kind=kind))
    samples = open_loop(url, calls)
    parts = {kind: [s for s in samples if s.call.kind == kind] for kind in ("interactive", "background")}
    return Run(name, rate, parts, seconds)


if __name__ == "__main__":
    main()
