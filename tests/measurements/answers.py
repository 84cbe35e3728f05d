"""Which buckets should leave late: the same load against several settings of lanes.short.late_from, in turns.

Closed loop for the throughput, open loop at a share of it for the latency by length.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from builders.ports import free_ports
from builders.server import TritonServer
from tests.integration.conftest import PATIENT
from tests.texts import mixed_texts
from tests.tools.load import Call, closed_loop, open_loop, percentile_ms, poisson
from tests.tools.repositories import repository


def measure(label: str, overrides: dict[str, Any], base: str, *, texts: int, rate: float, seconds: float) -> float:
    """Print one row; returns the closed loop's texts a second."""
    with tempfile.TemporaryDirectory() as folder:
        built = repository(Path(folder), base, **overrides)
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            corpus = mixed_texts(texts, seed=1)
            samples, elapsed = closed_loop(server.grpc_url, [Call((text,)) for text in corpus], clients=32)
            errors = {sample.error for sample in samples if sample.error}
            assert not errors, errors
            throughput = len(samples) / elapsed
            corpus = mixed_texts(int(rate * seconds * 2) + 10, seed=2)
            times = poisson(rate, seconds, seed=3)
            calls = [Call((text,), at=at) for text, at in zip(corpus, times, strict=False)]
            samples = open_loop(server.grpc_url, calls)
            short = [s for s in samples if len(s.call.texts[0]) < 250]
            rest = [s for s in samples if len(s.call.texts[0]) >= 250]
            parts = {"short": short, "rest": rest}
            latencies = " | ".join(
                f"{name} P50 {percentile_ms(part, 50):6.0f} P99 {percentile_ms(part, 99):6.0f}"
                for name, part in parts.items()
            )
            errors = sum(sample.error is not None for sample in samples)
            print(
                f"{label:42} {throughput:7.1f}/s closed 32 | open {rate:.0f}/s: {latencies} | errors {errors}",
                flush=True,
            )
    return throughput


def main() -> None:
    """Print a row per setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="deploy.cpu.yaml")
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--rate", type=float, default=20, help="open loop, texts a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--late-from", nargs="*", default=["none", "512", "128", "16"])
    parser.add_argument("--late-bound", type=int, nargs="*", default=[2])
    parser.add_argument("--processes", type=int, nargs="*", default=[2])
    parser.add_argument("--batch", type=int, nargs="*", default=[8], help="lanes.short.batch")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048], help="engine.max_batch_tokens")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for processes in options.processes:
            for late in options.late_from:
                for bound in options.late_bound if late != "none" else options.late_bound[:1]:
                    for batch in options.batch:
                        for tokens in options.tokens:
                            overrides = {
                                "entry": {**PATIENT, "processes": processes},
                                "lanes": {
                                    "short": {
                                        "late_from": None if late == "none" else int(late),
                                        "late_bound": bound,
                                        "batch": batch,
                                    }
                                },
                                "engine": {"max_batch_tokens": tokens},
                            }
                            label = f"late {late} bound {bound} proc {processes} batch {batch} tok {tokens}"
                            measure(
                                label,
                                overrides,
                                options.base,
                                texts=options.texts,
                                rate=options.rate,
                                seconds=options.seconds,
                            )


if __name__ == "__main__":
    main()
