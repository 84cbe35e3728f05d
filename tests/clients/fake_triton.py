"""A server in this process that speaks Triton's protocol, gRPC and HTTP, and answers as the entry model does.

What the real server answers was read off tritonserver 2.51; the real one is tested in the integration tests. The task
is chosen by the model's name; every other name encodes.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

DIM = 8
LABELS = ("number", "place", "person")
TASKS = {
    "encode_topics": "classification",
    "encode_rerank": "reranking",
    "encode_names": "tagging",
    "encode_answers": "answering",
}
Failure = tuple[grpc.StatusCode, str]
Arrays = dict[str, tuple[str, np.ndarray]]
_HTTP_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}


def vector(text: bytes, dim: int = DIM) -> np.ndarray:
    """float32 [dim], the same for the same text and no other."""
    return np.resize(
        np.frombuffer(hashlib.sha256(text).digest(), np.uint32).astype(np.float32) / np.float32(2**32), dim
    )


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    texts: list[bytes]
    shape: list[int]
    parameters: dict[str, object]
    model: str
    remaining: float | None
    """Seconds until the client's deadline, which gRPC sends and HTTP does not."""
    pairs: list[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    at: float = 0.0
    """time.monotonic()."""


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Settings of the answers, and what was asked."""

    fail: Callable[[list[bytes]], Failure | None] = lambda texts: None
    delay: Callable[[list[bytes]], float] = lambda texts: 0.0
    dim: Callable[[list[bytes]], int] = lambda texts: DIM
    #: Sizes that requests may choose; the output's own size is then free.
    dimensions: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ("EMBEDDING", "TOKENS", "CUT")
    labels: Callable[[str], tuple[str, ...]] = lambda version: LABELS
    version: Callable[[list[bytes]], str] = lambda texts: "1"
    index: bool = True
    """Whether the repository's index is open to everybody."""
    ready: bool = True
    url: str = ""
    http_url: str = ""
    connections: int = 0
    """Connections that HTTP clients have made."""
    seen: list[Seen] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    asked_with: list[dict[str, str]] = field(default_factory=list)
    """Headers of the questions about a model, names in lower case."""
    most_at_once: int = 0
    cancelled: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # What is answered, whatever the protocol

    def infer(self, seen: Seen, active: Callable[[], bool]) -> Failure | Arrays:
        """Notes the request, waits as long as it is told to, and gives what it is told to."""
        texts = seen.texts
        with self._lock:
            self.seen.append(seen)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        ends = time.monotonic() + self.delay(texts)
        while time.monotonic() < ends and active():
            time.sleep(0.002)
        with self._lock:
            self._now -= 1
            self.cancelled += not active()
        failure = self.fail(texts)
        return failure if failure else self._arrays(seen)

    def _arrays(self, seen: Seen) -> Arrays:
        texts, pairs = seen.texts, seen.pairs or [b""] * len(seen.texts)
        counts: Arrays = {
            "TOKENS": ("INT32", np.array([[len(text)] for text in texts], np.int32)),
            "CUT": ("INT32", np.array([[len(text) // 10] for text in texts], np.int32)),
        }
        task = TASKS.get(seen.model, "embedding")
        if task == "classification":
            scores = [[text.startswith(word) * 0.5 + 0.1 for word in (b"How", b"Where", b"Who")] for text in texts]
            return {"SCORES": ("FP32", np.array(scores, np.float32)), **counts}
        if task == "reranking":
            shared = [[len(words(a) & words(b)) / (1 + len(words(b)))] for a, b in zip(texts, pairs, strict=True)]
            return {"SCORES": ("FP32", np.array(shared, np.float32)), **counts}
        if task == "tagging":
            return {"ENTITIES": ("BYTES", _column([names_in(text) for text in texts])), **counts}
        if task == "answering":
            return {"ANSWERS": ("BYTES", _column([last_word(context) for context in pairs])), **counts}
        dim = int(seen.parameters.get("dimensions", self.dim(texts)))  # type: ignore[call-overload]
        arrays = {"EMBEDDING": ("FP32", np.stack([vector(text, dim) for text in texts])), **counts}
        return {name: arrays[name] for name in self.outputs}

    def reply(self, kind: str, name: str = "", version: str = "") -> Any:
        """The protobuf reply to a question."""
        self.asked.append(kind)
        if kind == "live":
            return service_pb2.ServerLiveResponse(live=True)
        if kind == "ready":
            return service_pb2.ModelReadyResponse(ready=self.ready)
        if kind == "server":
            return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")
        if kind == "metadata":
            metadata = service_pb2.ModelMetadataResponse(name=name)
            for output in self.outputs:
                dim = (-1 if self.dimensions else self.dim([])) if output == "EMBEDDING" else 1
                metadata.outputs.add(name=output, datatype="FP32", shape=[-1, dim])
            return metadata
        if kind == "config":
            answer = service_pb2.ModelConfigResponse()
            answer.config.name = name
            task = TASKS.get(name, "embedding")
            answer.config.parameters["task"].string_value = task
            if task == "classification":
                answer.config.parameters["labels"].string_value = json.dumps(self.labels(version))
            answer.config.parameters["limits"].string_value = json.dumps({"max_tokens": 512, "buckets": [128, 512]})
            answer.config.parameters["dimensions"].string_value = json.dumps(self.dimensions)
            size = -1 if self.dimensions else self.dim([])
            answer.config.output.add(name="EMBEDDING" if task == "embedding" else "SCORES", dims=[size])
            return answer
        if kind == "statistics":
            statistics = service_pb2.ModelStatisticsResponse()
            for number, model in enumerate(("encode", "encoder_128")):
                one = statistics.model_stats.add(name=model, version="1", inference_count=60, execution_count=20)
                one.inference_stats.success.count, one.inference_stats.fail.count = 30, 7
                one.inference_stats.queue.ns, one.inference_stats.compute_infer.ns = 90_000_000, 300_000_000
                if number:
                    one.batch_stats.add(batch_size=3).compute_infer.count = 20
            return statistics
        index = service_pb2.RepositoryIndexResponse()
        index.models.add(name="encode", version="1", state="READY")
        index.models.add(name="encoder_128", version="1", state="READY")
        index.models.add(name="encoder_512", version="2", state="UNAVAILABLE", reason="unloaded")
        return index

    # gRPC

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.reply("live")

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.reply("ready", request.name)

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.reply("server")

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked_with.append(_joined(context.invocation_metadata()))
        return self.reply("metadata", request.name)

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked_with.append(_joined(context.invocation_metadata()))
        return self.reply("config", request.name, request.version)

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.reply("statistics")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self.index:
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'x'")
        return self.reply("index")

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        tensors = [list(deserialize_bytes_tensor(raw)) for raw in request.raw_input_contents]
        inputs = dict(zip((tensor.name for tensor in request.inputs), tensors, strict=True))
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
        }
        seen = Seen(
            inputs["TEXT"],
            list(request.inputs[0].shape),
            parameters,
            request.model_name,
            context.time_remaining(),
            inputs.get("TEXT_PAIR"),
            _joined(context.invocation_metadata()),
            time.monotonic(),
        )
        given = self.infer(seen, context.is_active)
        if isinstance(given, tuple):
            context.abort(*given)
        answer = service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=self.version(inputs["TEXT"])
        )
        for name, (datatype, array) in given.items():
            answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
            answer.raw_output_contents.append(raw_bytes(array))
        return answer

    # HTTP

    def post_infer(self, model: str, headers: Mapping[str, str], body: bytes, active: Callable[[], bool]) -> Any:
        """Code, body and length of its JSON part."""
        at = int(headers["Inference-Header-Content-Length"])
        head, inputs = json.loads(body[:at]), {}
        for tensor in head["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            inputs[tensor["name"]] = list(deserialize_bytes_tensor(body[at : at + size]))
            at += size
        assert at == len(body)
        parameters = dict(head["parameters"])
        assert parameters.pop("binary_data_output") is True
        lower = {name.lower(): value for name, value in headers.items()}
        shape = list(head["inputs"][0]["shape"])
        seen = Seen(inputs["TEXT"], shape, parameters, model, None, inputs.get("TEXT_PAIR"), lower, time.monotonic())
        given = self.infer(seen, active)
        if isinstance(given, tuple):
            return _HTTP_CODES[given[0]], json.dumps({"error": given[1]}).encode(), None
        outputs, raw = [], []
        for name, (datatype, array) in given.items():
            raw.append(raw_bytes(array))
            size = {"binary_data_size": len(raw[-1])}
            outputs.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": size})
        answer = {"model_name": model, "model_version": self.version(inputs["TEXT"]), "outputs": outputs}
        encoded = json.dumps(answer).encode()
        return 200, b"".join([encoded, *raw]), len(encoded)

    def get(self, path: str) -> tuple[int, bytes]:
        """Code and body of a question."""
        model = re.match(r"^/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|config))?$", path)
        if path == "/v2/health/live":
            return 200, b""
        if path == "/v2/repository/index":
            reply = MessageToDict(self.reply("index"), preserving_proto_field_name=True)["models"]
            return (200, json.dumps(reply).encode()) if self.index else (403, b'{"error": "restricted"}')
        if path in ("/v2", "/v2/models/stats"):
            message = self.reply("server" if path == "/v2" else "statistics")
        elif model is None:
            return 404, b""
        elif model[3] == "ready":
            return (200 if self.reply("ready", model[1]).ready else 400), b""
        else:
            message = self.reply(model[3] or "metadata", model[1], model[2] or "")
        reply = MessageToDict(message, preserving_proto_field_name=True)
        return 200, json.dumps(reply.get("config", reply)).encode()


def _joined(headers: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Headers by name; what was sent twice shows."""
    given: dict[str, str] = {}
    for name, value in headers:
        given[name] = f"{given[name]}, {value}" if name in given else str(value)
    return given


def words(text: bytes) -> set[str]:
    return set(re.findall(r"\w+", text.decode().lower()))


def names_in(text: bytes) -> bytes:
    known = {"Ada": "PER", "Paris": "LOC"}
    found = [
        {"entity_group": known[one[0]], "score": 0.9, "word": one[0], "start": one.start(), "end": one.end()}
        for one in re.finditer(r"\w+", text.decode())
        if one[0] in known
    ]
    return json.dumps(found).encode()


def last_word(context: bytes) -> bytes:
    text = context.decode()
    start = text.rfind(" ") + 1
    return json.dumps({"answer": text[start:], "score": 0.8, "start": start, "end": len(text)}).encode()


def _column(items: list[bytes]) -> np.ndarray:
    array = np.empty((len(items), 1), np.object_)
    array[:, 0] = items
    return array


def raw_bytes(array: np.ndarray) -> bytes:
    return serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes()


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with kept connections, as Triton's."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer: two would wait for each other (Nagle and delayed acknowledgements)
    fake: FakeTriton

    def setup(self) -> None:
        super().setup()
        self.fake.connections += 1

    def do_GET(self) -> None:
        self.fake.asked_with.append({name.lower(): value for name, value in self.headers.items()})
        self._answer(*self.fake.get(self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        model = re.match(r"^/v2/models/([^/]+)/infer$", self.path)
        if model is None:
            self._answer(*self.fake.get(self.path))
            return
        self._answer(*self.fake.post_infer(model[1], dict(self.headers), body, self._active))

    def _active(self) -> bool:
        """Whether the client is still there."""
        if isinstance(self.connection, ssl.SSLSocket):
            return True
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _answer(self, code: int, body: bytes, json_length: int | None = None) -> None:
        try:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            if json_length is not None:
                self.send_header("Inference-Header-Content-Length", str(json_length))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that goes away is part of the tests


@contextmanager
def serve(keys: grpc.ServerCredentials | None = None, context: ssl.SSLContext | None = None) -> Iterator[FakeTriton]:
    """Runs both servers on free ports of 127.0.0.1.

    Args:
        keys: encrypt gRPC.
        context: encrypt HTTP.
    """
    fake = FakeTriton()
    server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0") if keys is None else server.add_secure_port("127.0.0.1:0", keys)
    fake.url = f"127.0.0.1:{port}"
    server.start()
    http = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    if context is not None:
        http.socket = context.wrap_socket(http.socket, server_side=True)
    fake.http_url = f"http{'' if context is None else 's'}://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
        server.stop(0).wait()
