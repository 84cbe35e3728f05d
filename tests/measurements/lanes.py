"""Lanes against one mixed lane, and the arrival of rejects (docs/reliability.md).

`python -m tests.measurements.lanes` measures at service times like a GPU's: short requests alone, beside long traffic
that saturates the long lane, and beside the same traffic with all buckets in one lane; then an overload of interactive
requests that have 200 ms, which it does on a CPU's own engines, too. Exit code 1 when a promise does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

SHORT = [text for text in mixed_texts(400, seed=5) if len(text) < 1500]
LONG = " ".join(mixed_texts(40, seed=6))[:3000]
ONE_LANE: dict[str, Any] = {"short": {"up_to": 2048, "batch": 8, "late_from": None}, "long": {"above": 2048}}
PATIENT = {"timeout_ms": 60_000, "queue_size": 10_000}
#: P95 and longest, milliseconds. Triton looks at its timeouts when an instance frees, and every 500 ms. With a GPU's
#: batches the first comes soon; on a CPU it is 200 + 500 ms, and then the server's own threads wait for a core, too.
REJECT_MS = {"timed": (300.0, 700.0), "cpu": (700.0, 1500.0)}
#: Memory that an overload may take on top, MiB.
MEMORY_MIB = 256.0
PARTS = ("lanes", "rejects", "rejects-cpu")


def main() -> None:
    """Print all figures and whether the promises hold; exit code 1 when one does not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--service-ms", type=float, default=20, help="of a batch of the short lane")
    parser.add_argument("--long-ms", type=float, default=120, help="of a batch of a long bucket")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rate", type=float, default=60, help="short requests a second")
    parser.add_argument("--long-clients", type=int, default=12, help="closed loop; more than the long lane can do")
    parser.add_argument("--seconds", type=float, default=45, help="of each run")
    options = parser.parse_args()
    promises: list[Promise] = []
    if "lanes" in options.parts:
        promises += _lanes(options)
    if "rejects" in options.parts:
        promises += _rejects(options, "timed")
    if "rejects-cpu" in options.parts:
        promises += _rejects(options, "cpu")
    sys.exit(0 if print_promises(promises) else 1)


@contextmanager
def _server(
    options: argparse.Namespace, interactive: Mapping[str, float], engine: str = "timed", **overrides: Any
) -> Iterator[TritonServer]:
    entry: dict[str, Any] = {"interactive": dict(interactive), "background": PATIENT}
    with tempfile.TemporaryDirectory() as folder:
        if engine == "cpu":
            built = repository(Path(folder), entry=entry, **overrides)
        else:
            built = timed_repository(
                Path(folder),
                options.service_ms / 1000,
                "deploy.long.cpu.yaml",
                long_s=options.long_ms / 1000,
                entry=entry | {"processes": options.processes},
                **overrides,
            )
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            open_loop(server.grpc_url, [*[Call((text,)) for text in SHORT[:64]], Call((LONG,))])
            yield server


# The lanes


@dataclass(frozen=True)
class Short:
    """Short texts of one run, and how many long ones a second were answered beside them."""

    name: str
    samples: list[Sample]
    long_rate: float = 0.0

    @property
    def p99(self) -> float:
        """Milliseconds."""
        return percentile_ms(self.samples, 99)

    @property
    def failed(self) -> list[str]:
        """What went wrong with those that have no answer."""
        return [sample.error for sample in self.samples if sample.error]

    def row(self) -> list[str]:
        """For the table."""
        figures = [str(len(self.samples)), f"{percentile_ms(self.samples, 50):.1f}", f"{self.p99:.1f}"]
        return [self.name, *figures, str(len(self.failed)), f"{self.long_rate:.1f}" if self.long_rate else "—"]


def _lanes(options: argparse.Namespace) -> list[Promise]:
    with _server(options, PATIENT) as server, MemoryWatch(server.pid or 0) as watch:
        alone = _short("short alone", server.grpc_url, options)
        beside = _beside_long("beside long texts, two lanes", server.grpc_url, options)
        after = _short("short alone again", server.grpc_url, options)
    with _server(options, PATIENT, lanes=ONE_LANE) as server:
        mixed = _beside_long("beside long texts, one lane", server.grpc_url, options)
    print(
        f"\nBatches of {options.service_ms:g} ms, of long texts {options.long_ms:g} ms; short texts at "
        f"{options.rate:g}/s; {options.long_clients} clients that send long ones in a closed loop\n"
    )
    runs = (alone, beside, after, mixed)
    header = ["load", "requests", "P50 ms", "P99 ms", "failed", "long texts/s"]
    for line in markdown(header, [run.row() for run in runs]):
        print(line)
    print(f"\n{watch.text()}", flush=True)
    failed = [error for run in runs for error in run.failed]
    if failed:
        print(f"the first that failed: {failed[0]}")
    base = (alone.p99 + after.p99) / 2
    left = 100 * (beside.p99 - base) / (mixed.p99 - base)
    return [
        Promise("P99 of short texts: what two lanes leave of one lane's rise", left, 20, "%"),
        Promise("requests without an answer beside the lanes", len(failed), 0),
        *_memory("lanes", watch),
    ]


def _short(name: str, url: str, options: argparse.Namespace) -> Short:
    times = poisson(options.rate, options.seconds, seed=len(name))
    return Short(name, open_loop(url, [Call((SHORT[n % len(SHORT)],), at=at) for n, at in enumerate(times)]))


def _beside_long(name: str, url: str, options: argparse.Namespace) -> Short:
    stop = threading.Event()
    counts: list[int] = []

    def saturate() -> None:
        while not stop.is_set():
            calls = [Call((LONG,), {"parameters": {"class": "background"}})] * (2 * options.long_clients)
            samples, _ = closed_loop(url, calls, clients=options.long_clients)
            counts.append(sum(sample.error is None for sample in samples))

    thread = threading.Thread(target=saturate)
    began = time.perf_counter()
    thread.start()
    try:
        short = _short(name, url, options)
    finally:
        stop.set()
        thread.join()
    return replace(short, long_rate=sum(counts) / (time.perf_counter() - began))


# The rejects


def _rejects(options: argparse.Namespace, engine: str) -> list[Promise]:
    """Twice the rate that the server can do, all interactive with 200 ms."""
    with _server(options, {"timeout_ms": 200, "queue_size": 4000}, engine) as server:
        # Four texts of one bucket a request, so that the client has little to do; on a CPU the usual mix.
        texts = [tuple(f"text {number}" for number in range(4))] if engine == "timed" else [(text,) for text in SHORT]
        calls = [Call(texts[n % len(texts)], {"priority": 2}) for n in range(400)]
        samples, took = closed_loop(server.grpc_url, calls, clients=64)
        rate = 2 * len(samples) / took
        with MemoryWatch(server.pid or 0) as watch:
            times = poisson(rate, options.seconds, seed=4)
            calls = [Call(texts[n % len(texts)], {"priority": 1}, at=at) for n, at in enumerate(times)]
            samples = open_loop(server.grpc_url, calls)
    rejected = [sample for sample in samples if _is_reject(sample)]
    latency = 1000 * np.array([sample.latency for sample in rejected] or [np.nan])
    other = sum(sample.error is not None for sample in samples) - len(rejected)
    what = f"batches of {options.service_ms:g} ms" if engine == "timed" else "a CPU's engines"
    print(
        f"\nRejects, {what}: {len(rejected)} of {len(samples)} requests of {len(texts[0])} text(s) rejected at "
        f"{rate:.0f}/s; P50 {np.percentile(latency, 50):.0f} ms; other errors {other}\n{watch.text()}",
        flush=True,
    )
    p95, longest = REJECT_MS[engine]
    return [
        Promise(f"reject after 200 ms, {what}: P95", float(np.percentile(latency, 95)), p95, "ms"),
        Promise(f"reject after 200 ms, {what}: longest", float(latency.max()), longest, "ms"),
        Promise(f"errors that are no rejects, {what}", other, 0),
        *_memory(f"rejects, {what}", watch),
    ]


def _is_reject(sample: Sample) -> bool:
    return "Request timeout expired" in (sample.error or "")


def _memory(name: str, watch: MemoryWatch) -> list[Promise]:
    server, models = watch.growth()
    return [
        Promise(f"memory of the server, most above its first ({name})", server, MEMORY_MIB, "MiB"),
        Promise(f"memory of the model processes, the same ({name})", models, MEMORY_MIB, "MiB"),
    ]


if __name__ == "__main__":
    main()
