"""Executions per second over minutes with four entry processes: do they stay level (docs/queue.md, server#8870)?"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

from builders.ports import free_ports
from builders.server import TritonServer
from tests.tools.load import Call, closed_loop, percentile_ms
from tests.tools.metrics import counter
from tests.tools.repositories import timed_repository


def main() -> None:
    """Print a row per interval, then the first and the last fifth side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--interval", type=float, default=30, help="seconds of a row")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--clients", type=int, default=64, help="closed loop")
    parser.add_argument("--service-ms", type=float, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = timed_repository(
            Path(folder),
            options.service_ms / 1000,
            entry={"processes": options.processes, "interactive": {"timeout_ms": 2000, "queue_size": 1024}},
        )
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            rows = _measure(server, options.minutes * 60, options.interval, options.clients)
    fifth = max(1, len(rows) // 5)
    first, last = sum(rows[:fifth]) / fifth, sum(rows[-fifth:]) / fifth
    print(f"first fifth {first:.1f}/s, last fifth {last:.1f}/s: {last / first - 1:+.1%}")


def _measure(server: TritonServer, seconds: float, interval: float, clients: int) -> list[float]:
    stop = time.monotonic() + seconds
    failures: list[str] = []

    def load() -> None:
        number = 0
        while time.monotonic() < stop:
            calls = [Call((f"text {number + n}",), {"priority": 1 + n % 2}) for n in range(2000)]
            samples, _ = closed_loop(server.grpc_url, calls, clients)
            failures.extend(sample.error for sample in samples if sample.error)
            number += len(calls)
            if number % 20_000 == 0:
                print(
                    f"    P50 {percentile_ms(samples, 50):.0f} ms, P99 {percentile_ms(samples, 99):.0f} ms", flush=True
                )

    thread = threading.Thread(target=load)
    thread.start()
    rows = []
    name = "nv_inference_exec_count"
    while time.monotonic() + interval < stop:
        before, began = counter(server.metrics_url, name, model="encode"), time.monotonic()
        time.sleep(interval)
        rows.append((counter(server.metrics_url, name, model="encode") - before) / (time.monotonic() - began))
        print(f"{len(rows) * interval:6.0f} s  {rows[-1]:6.1f} executions/s  failures {len(failures)}", flush=True)
    thread.join()
    return rows


if __name__ == "__main__":
    main()
