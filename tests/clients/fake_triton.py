"""A gRPC server in this process that speaks Triton's protocol and answers as the entry model `encode` does.

What the real server answers was read off tritonserver 2.51; the real one is tested in the integration tests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

DIM = 8
Failure = tuple[grpc.StatusCode, str]


def vector(text: bytes) -> np.ndarray:
    """float32 [DIM], the same for the same text and no other."""
    return np.frombuffer(hashlib.sha256(text).digest(), np.uint32).astype(np.float32) / np.float32(2**32)


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    texts: list[bytes]
    shape: list[int]
    parameters: dict[str, object]
    model: str
    remaining: float | None
    """Seconds until the client's deadline."""


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Settings of the answers, and what was asked."""

    fail: Callable[[list[bytes]], Failure | None] = lambda texts: None
    delay: Callable[[list[bytes]], float] = lambda texts: 0.0
    dim: Callable[[list[bytes]], int] = lambda texts: DIM
    outputs: tuple[str, ...] = ("EMBEDDING", "TOKENS", "CUT")
    ready: bool = True
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    most_at_once: int = 0
    cancelled: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        answer = service_pb2.ModelMetadataResponse(name=request.name)
        for name in self.outputs:
            answer.outputs.add(name=name, datatype="FP32", shape=[-1, DIM if name == "EMBEDDING" else 1])
        return answer

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        texts = list(deserialize_bytes_tensor(request.raw_input_contents[0]))
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
        }
        with self._lock:
            self.seen.append(
                Seen(texts, list(request.inputs[0].shape), parameters, request.model_name, context.time_remaining())
            )
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        ends = time.monotonic() + self.delay(texts)
        while time.monotonic() < ends and context.is_active():
            time.sleep(0.002)
        with self._lock:
            self._now -= 1
            self.cancelled += not context.is_active()
        if failure := self.fail(texts):
            context.abort(*failure)
        return self._answer(texts)

    def _answer(self, texts: list[bytes]) -> Any:
        arrays = {
            "EMBEDDING": ("FP32", np.stack([vector(text)[: self.dim(texts)] for text in texts])),
            "TOKENS": ("INT32", np.array([[len(text)] for text in texts], np.int32)),
            "CUT": ("INT32", np.array([[len(text) // 10] for text in texts], np.int32)),
        }
        answer = service_pb2.ModelInferResponse(model_name="encode")
        for name in self.outputs:
            datatype, array = arrays[name]
            answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer


@contextmanager
def serve() -> Iterator[FakeTriton]:
    """Runs the server on a free port of 127.0.0.1."""
    fake = FakeTriton()
    server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(0).wait()
