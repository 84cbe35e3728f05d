"""What the generator itself costs: its latency floor and its highest rate, against a server that does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from clients.load.plan import Segment, closed_plan, open_plan
from clients.load.run import LoadOptions, run_load
from clients.load.summary import percentile_of
from clients.load.target import Target
from clients.load.texts import TextSource

_DIM = 384


@dataclass(frozen=True)
class Floor:
    """The generator's own figures on this machine.

    Attributes:
        rate: offered in the open loop, requests a second.
        p50_ms, p99_ms: latency of that load from the scheduled time.
        late_p99_ms: P99 of the generator's delay in it.
        max_rate: answered requests a second in a closed loop: no load above this can be made here.
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
            f"the generator itself, {self.processes} processes, against a server that does nothing: P50 "
            f"{self.p50_ms:.2f} ms, P99 {self.p99_ms:.2f} ms at {self.rate:g}/s (late by {self.late_p99_ms:.2f} ms, "
            f"P99); at most {self.max_rate:.0f} requests/s"
        )


@contextmanager
def null_server(threads: int = 4) -> Iterator[str]:
    """A gRPC server in this process that gives every request the same answer, unread; yields its host:port."""
    answer = service_pb2.ModelInferResponse(model_name="encode")
    for name, datatype, shape, raw in (
        ("EMBEDDING", "FP32", [1, _DIM], bytes(4 * _DIM)),
        ("TOKENS", "INT32", [1, 1], (1).to_bytes(4, "little")),
        ("CUT", "INT32", [1, 1], bytes(4)),
    ):
        answer.outputs.add(name=name, datatype=datatype, shape=shape)
        answer.raw_output_contents.append(raw)
    ready = answer.SerializeToString()
    # No serialisers: the request stays bytes, the answer is bytes already.
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: ready)
    handlers = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
    server = grpc.server(ThreadPoolExecutor(threads))
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def measure_floor(processes: int, *, rate: float = 200.0, seconds: float = 3.0, clients: int = 32) -> Floor:
    """Measures the generator for about twice `seconds`.

    Args:
        processes: of the generator.
        rate: of the open loop, requests a second; with `seconds` enough of them for a P99.
        seconds: of each of the two loads.
        clients: of the closed loop.
    """
    source = TextSource()
    with null_server() as url:
        target = Target(url)
        opened = run_load(target, open_plan(source, [Segment(rate, rate, seconds)]), LoadOptions(processes))
        closed = run_load(
            target, closed_plan(source, 200, seconds), LoadOptions(processes, clients=max(clients, processes))
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
