"""The entry beside an ensemble of one bucket, same server, same texts (docs/queue.md, "Ensembles").

`python -m tests.measurements.ensemble` prints throughput, latency at a steady rate, and what an interactive request
waits behind a backlog, of both; `--engine timed` with lanes that sleep, as on a GPU, so that the engine does not hide
what the ways differ in. Exit code 1 when an interactive request does not overtake a backlog in the ensemble.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builders.ports import free_ports
from builders.server import TritonServer
from tests.texts import mixed_texts
from tests.tools.load import Call, closed_loop, open_loop, percentile_ms, poisson
from tests.tools.promises import Promise, markdown, print_promises
from tests.tools.repositories import repository, timed_repository

BUCKET = 128
#: Cut to the bucket by both, so that neither has less to compute.
TEXTS = [" ".join(text.split()[:55]) for text in mixed_texts(300, seed=5)]


def main() -> None:
    """Print the figures of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["timed", "cpu"], default="cpu", help="lanes of known time, or real ones")
    parser.add_argument("--service-ms", type=float, default=10, help="of a timed batch")
    parser.add_argument("--processes", type=int, default=2, help="of the entry, and tokenising ones of the ensemble")
    parser.add_argument("--seconds", type=float, default=20, help="of each load")
    parser.add_argument("--backlog", type=int, default=600, help="requests that an interactive one meets")
    options = parser.parse_args()
    level = {"timeout_ms": 600_000, "queue_size": 10_000}
    overrides: dict[str, Any] = {
        "buckets": [BUCKET],
        "model": {"max_tokens": BUCKET},
        "entry": {"processes": options.processes, "interactive": level, "background": level},
        "ensembles": {"buckets": [BUCKET], "processes": options.processes},
        # As in production: a queued lane of 2 texts cannot be woken for a backlog of 600 (docs/queue.md).
        "lanes": {"short": {"batch": 32, "late_from": None}},
        "engine": {"max_batch": 32, "max_batch_tokens": 16_384},
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "timed":
            built = timed_repository(Path(folder), options.service_ms / 1000, **overrides)
        else:
            built = repository(Path(folder), **overrides)
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            ways: list[Way] = []
            for model in ("encode", f"ensemble_{BUCKET}"):
                most = _maximum(server.grpc_url, model, options.seconds)
                # The same for both, so that their latencies compare.
                rate = ways[0].rate if ways else 0.5 * most
                steady = _steady(server.grpc_url, model, rate, options.seconds)
                waited, drained = _behind_backlog(server.grpc_url, model, options.backlog)
                ways.append(Way(model, most, rate, *steady, waited, drained))
                print(ways[-1], flush=True)
    engine = f"batches of {options.service_ms:g} ms" if options.engine == "timed" else "a CPU's engine"
    print(f"\nOne bucket of {BUCKET} tokens, {engine}, {options.processes} processes\n")
    header = ["model", "texts/s, 32 clients", f"P50 ms at {ways[0].rate:.0f}/s", "P99 ms"]
    header += [f"interactive behind {options.backlog}, ms", "the backlog itself, ms"]
    for line in markdown(header, [way.row() for way in ways]):
        print(line)
    entry, ensemble = ways
    held = print_promises(
        [
            Promise(
                "interactive behind the backlog of the ensemble, share of its time", 100 * ensemble.overtaken, 25, "%"
            ),
            Promise("the same in the entry", 100 * entry.overtaken, None, "%"),
            Promise("throughput of the ensemble by the entry's", ensemble.most / entry.most, None, "×"),
            Promise("P99 of the ensemble by the entry's", ensemble.p99 / entry.p99, None, "×"),
        ]
    )
    sys.exit(0 if held else 1)


@dataclass(frozen=True)
class Way:
    """What one model gave.

    Attributes:
        model: its name.
        most: texts a second of 32 clients in a closed loop.
        rate: texts a second that were offered for the latency.
        p50, p99: at that rate, milliseconds.
        waited: median latency of an interactive request behind a backlog, seconds.
        drained: median time until the backlog itself was answered, seconds.
    """

    model: str
    most: float
    rate: float
    p50: float
    p99: float
    waited: float
    drained: float

    @property
    def overtaken(self) -> float:
        """Share of the backlog's time that the interactive request took; near 1 when it overtook nothing."""
        return self.waited / self.drained

    def row(self) -> list[str]:
        """For the table."""
        figures = (self.p50, self.p99, 1000 * self.waited, 1000 * self.drained)
        return [self.model, f"{self.most:.1f}", *(f"{figure:.0f}" for figure in figures)]


def _call(model: str, number: int, at: float = 0.0, priority: int = 2) -> Call:
    return Call((TEXTS[number % len(TEXTS)],), {"priority": priority}, at=at, model=model)


def _maximum(url: str, model: str, seconds: float) -> float:
    closed_loop(url, [_call(model, number) for number in range(64)], clients=32)
    rates, spent = [], 0.0
    while spent < seconds:
        samples, took = closed_loop(url, [_call(model, number) for number in range(400)], clients=32)
        failed = [sample.error for sample in samples if sample.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        rates.append(len(samples) / took)
        spent += took
    return float(np.median(rates))


def _steady(url: str, model: str, rate: float, seconds: float) -> tuple[float, float]:
    calls = [_call(model, number, at) for number, at in enumerate(poisson(rate, seconds, seed=4))]
    samples = open_loop(url, calls)
    return percentile_ms(samples, 50), percentile_ms(samples, 99)


def _behind_backlog(url: str, model: str, backlog: int) -> tuple[float, float]:
    """Seconds that an interactive request took that came half a second after a backlog, and that this took."""
    waits, drains = [], []
    for _ in range(5):
        calls = [_call(model, number) for number in range(backlog)]
        samples = open_loop(url, [*calls, _call(model, 0, at=0.5, priority=1)])
        failed = [sample.error for sample in samples if sample.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        waits.append(samples[-1].latency)
        drains.append(max(sample.latency for sample in samples))
    return float(np.median(waits)), float(np.median(drains))


if __name__ == "__main__":
    main()
