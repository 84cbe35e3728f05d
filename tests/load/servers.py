"""A gRPC server in this process whose answers take known times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

Failure = tuple[grpc.StatusCode, str]


@dataclass
class Timed:
    """Settings and what was seen.

    Attributes:
        delay: seconds from the first request's arrival -> how long the request of that moment waits.
        fail: number of the request -> how it fails, or None.
    """

    delay: Callable[[float], float] = lambda elapsed: 0.0
    fail: Callable[[int], Failure | None] = lambda number: None
    url: str = ""
    priorities: list[int] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    inputs: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    _first: float = 0.0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def infer(self, request: Any, context: grpc.ServicerContext) -> Any:
        now = time.monotonic()
        with self._lock:
            self._first = self._first or now
            number = len(self.priorities)
            self.inputs.append(
                {
                    one.name: raw[4:].decode()
                    for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)
                }
            )
            self.priorities.append(request.parameters["priority"].uint64_param)
            self.levels.append(request.parameters["class"].string_param)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        time.sleep(self.delay(now - self._first))
        with self._lock:
            self._now -= 1
        if failure := self.fail(number):
            context.abort(*failure)
        answer = service_pb2.ModelInferResponse(model_name="encode")
        answer.outputs.add(name="TOKENS", datatype="INT32", shape=[1, 1])
        answer.raw_output_contents.append((7).to_bytes(4, "little"))
        return answer


@contextmanager
def timed_server(threads: int = 200, **settings: Any) -> Iterator[Timed]:
    timed = Timed(**settings)
    method = grpc.unary_unary_rpc_method_handler(
        timed.infer,
        request_deserializer=service_pb2.ModelInferRequest.FromString,
        response_serializer=service_pb2.ModelInferResponse.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(threads))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method}),)
    )
    timed.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield timed
    finally:
        server.stop(0).wait()
