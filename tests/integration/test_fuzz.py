"""Malformed requests by the thousand, texts that tokenisers stumble over, and any request that hypothesis thinks of."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc.aio
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from builders.server import TritonServer
from tests.measurements.fuzz import run_fuzz
from tests.tools.load import text_input
from tests.tools.malformed import malformed
from tests.tools.memory import process_ids

#: What a client may get for a request that is no good; never an internal error of ours, never nothing.
REFUSED = {"StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE"}
SLOW_S = 20.0

pytestmark = pytest.mark.timeout(300)


# The other client


class Neighbour:
    """A client that asks the same good text again and again, and notes what it gets."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self.problems: list[str] = []
        self.answers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with triton.InferenceServerClient(self._server.grpc_url) as client:
            expected = None
            while not self._stop.is_set() or self.answers < 2:
                began = time.monotonic()
                try:
                    result = client.infer("encode", [text_input(["a good text"])], priority=1)
                except InferenceServerException as error:
                    # The one error that Triton gives to neighbours of a malformed request (see the last test).
                    if "incomplete string data" not in str(error):
                        self.problems.append(str(error))
                    self._stop.wait(0.2)
                    self.answers += 1
                    continue
                vector = result.as_numpy("EMBEDDING")
                expected = vector if expected is None else expected
                if not np.allclose(vector, expected, atol=1e-4):
                    self.problems.append("another vector")
                if time.monotonic() - began > SLOW_S:
                    self.problems.append(f"{time.monotonic() - began:.0f} s")
                self.answers += 1


@pytest.fixture(scope="module")
def neighbour(cpu_server: TritonServer) -> Iterator[Neighbour]:
    """Asks as long as the tests of this module run; they look at what it got."""
    pids = process_ids(cpu_server.pid or 0)
    with Neighbour(cpu_server) as asking:
        yield asking
    assert asking.problems == []
    assert pids <= process_ids(cpu_server.pid or 0)


# Any request


def wire(server: TritonServer, message: Any) -> str:
    """The code that a ModelInfer call ends with; OK for an answer."""

    async def call() -> str:
        async with grpc.aio.insecure_channel(server.grpc_url) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                await infer(message.SerializeToString(), timeout=SLOW_S)
            except grpc.aio.AioRpcError as error:
                return f"StatusCode.{error.code().name}"
            return "OK"

    return asyncio.run(call())


def encoded(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


SIZES = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63)]))
DATATYPES = st.sampled_from(["BYTES", "INT32", "FP32", "BOOL", "UINT64", "FP16", "", "bytes"])
#: Whole elements: one that is said to be longer than its bytes is a known fault of Triton (docs/reliability.md).
CONTENTS = st.one_of(
    st.lists(st.binary(max_size=64), max_size=40).map(encoded),
    st.lists(st.text(max_size=64).map(str.encode), min_size=1, max_size=4).map(encoded),
    st.binary(max_size=3),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
NAMES = st.sampled_from(["priority", "timeout", "truncate", "class", "prompt", "dimensions", "overlap", "other"])
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@QUICK
@given(shape=st.lists(SIZES, max_size=4), datatype=DATATYPES, contents=CONTENTS)
def test_grpc_request_answered_or_refused_whatever_its_type_shape_and_bytes(
    cpu_server: TritonServer, neighbour: Neighbour, shape: list[int], datatype: str, contents: bytes
) -> None:
    # A request of no rows and no columns alone in its batch is never answered by Triton 2.51 (docs/reliability.md).
    assume(shape != [0, 0])
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="TEXT", datatype=datatype, shape=shape)
    message = service_pb2.ModelInferRequest(model_name="encode", inputs=[tensor], raw_input_contents=[contents])
    assert wire(cpu_server, message) in {"OK", *REFUSED}
    assert neighbour.problems == []


@QUICK
@given(parameters=st.dictionaries(NAMES, VALUES, max_size=4))
def test_grpc_request_answered_or_refused_whatever_its_parameters(
    cpu_server: TritonServer, neighbour: Neighbour, parameters: dict[str, Any]
) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="TEXT", datatype="BYTES", shape=[1, 1])
    message = service_pb2.ModelInferRequest(
        model_name="encode", inputs=[tensor], raw_input_contents=[encoded([b"a good text"])]
    )
    for name, value in parameters.items():
        where = message.parameters[name]
        if isinstance(value, bool):
            where.bool_param = value
        elif isinstance(value, int):
            where.int64_param = value
        elif isinstance(value, float):
            where.double_param = value
        elif isinstance(value, str):
            where.string_param = value
    assert wire(cpu_server, message) in {"OK", *REFUSED}
    assert neighbour.problems == []


JSON = st.recursive(
    st.one_of(VALUES, st.sampled_from(["TEXT", "BYTES", 10**400])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=12,
)


def post(server: TritonServer, body: bytes) -> tuple[int, Any]:
    url = f"{server.http_url}/v2/models/encode/infer"
    try:
        with urllib.request.urlopen(url, body, timeout=SLOW_S) as response:  # noqa: S310 - loopback
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read().decode("utf-8", "replace"))


@QUICK
@given(
    changes=st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]), JSON, max_size=3),
    top=JSON,
)
def test_http_request_answered_or_refused_whatever_its_json(
    cpu_server: TritonServer, neighbour: Neighbour, changes: dict[str, Any], top: Any
) -> None:
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a good text"]}
    body = {"inputs": [tensor | changes], "parameters": top}
    status, answer = post(cpu_server, json.dumps(body).encode())
    # 500 is Triton's own word for JSON that it cannot use (README, "Errors").
    assert status in (200, 400, 404, 500, 501, 503)
    assert "error" in answer if status != 200 else "outputs" in answer
    assert neighbour.problems == []


@QUICK
@given(texts=st.lists(st.text(max_size=300), min_size=1, max_size=8))
def test_texts_get_finite_vectors_whatever_unicode_they_are(
    cpu_server: TritonServer, neighbour: Neighbour, texts: list[str]
) -> None:
    with triton.InferenceServerClient(cpu_server.grpc_url) as client:
        result = client.infer("encode", [text_input(texts)])
    vectors = result.as_numpy("EMBEDDING")
    assert vectors.shape == (len(texts), 384)
    assert np.isfinite(vectors).all()
    assert neighbour.problems == []


# The tokeniser

TORTURE: dict[str, str | bytes] = {
    "emoji with joiners": "👩‍👩‍👧‍👦🏳️‍🌈" * 50,
    "right to left": "שלום עולם مرحبا بالعالم" * 20,
    "direction marks": "\u202eabc\u202c\u2066x\u2069" * 100,
    "NUL": "a\0b\0\0c",
    "NUL alone": "\0" * 1000,
    "line feeds": "\n" * 60_000,
    "one letter, 64 KiB": "a" * 65_536,
    "one word a letter, 64 KiB": "a " * 32_768,
    "combining marks": "e" + "\u0301" * 20_000,
    "BOM": "\ufefftext\ufeff",
    "zero width": "\u200b\u200c\u200d\u2060" * 500,
    "private use": "\ue000\U0010fffd" * 500,
    "non-characters": "\ufffe\uffff\U0001ffff" * 500,
    "Han without blanks": "中" * 20_000,
    "Hangul jamo": "\u1112\u1161\u11ab" * 3000,
    "special tokens": "[CLS][SEP][MASK][PAD][UNK]" * 100,
    "controls": "".join(map(chr, range(32))) * 100,
    "one of each plane": "".join(chr(plane * 0x10000 + 0x100) for plane in range(17)),
}
REFUSED_TEXTS: dict[str, bytes] = {
    "1 MB": b"x" * 1_000_000,
    "100,000 line feeds": b"\n" * 100_000,
    "lone surrogate": b"a\xed\xa0\x80b",
    "two lone surrogates": b"\xed\xb0\x80\xed\xa0\x80",
    "UTF-16": "text".encode("utf-16"),
    "overlong": b"\xc0\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "cut short": "é".encode()[:1],
    "Latin-1": "é".encode("latin-1"),
}


@pytest.mark.parametrize("name", TORTURE)
def test_text_answered_when_it_is_hard_on_a_tokeniser(
    cpu_server: TritonServer, neighbour: Neighbour, name: str
) -> None:
    with triton.InferenceServerClient(cpu_server.grpc_url) as client:
        result = client.infer("encode", [text_input([TORTURE[name]])], client_timeout=SLOW_S)
    assert np.isfinite(result.as_numpy("EMBEDDING")).all()
    assert 2 <= result.as_numpy("TOKENS")[0, 0] <= 512
    assert neighbour.problems == []


@pytest.mark.parametrize("name", REFUSED_TEXTS)
def test_text_refused_as_invalid_when_it_is_no_utf8_or_too_large(
    cpu_server: TritonServer, neighbour: Neighbour, name: str
) -> None:
    with (
        triton.InferenceServerClient(cpu_server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=r"not UTF-8|entry\.max_text_bytes") as caught,
    ):
        client.infer("encode", [text_input([REFUSED_TEXTS[name]])], client_timeout=SLOW_S)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert neighbour.problems == []


# Malformed requests


def test_server_unhurt_when_2000_malformed_requests_come(cpu_server: TritonServer) -> None:
    report = run_fuzz(cpu_server, malformed(2000, seed=1), limit_s=SLOW_S)
    assert report.holds, "\n".join(report.lines())
    assert sum(report.sent.values()) == 2000
    assert len(report.sent) >= 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_server_unhurt_when_100000_malformed_requests_come(cpu_server: TritonServer) -> None:
    report = run_fuzz(cpu_server, malformed(100_000, seed=2), limit_s=SLOW_S)
    assert report.holds, "\n".join(report.lines())
    assert sum(report.sent.values()) == 100_000


def test_server_unhurt_when_json_is_nested_200000_deep(cpu_server: TritonServer) -> None:
    # With the stack that a process has by itself, 8 MB, Triton 2.51 ends at 50,000 (docs/reliability.md).
    body = b'{"inputs": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    head = b"POST /v2/models/encode/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", cpu_server.ports.http)) as connection:
        connection.settimeout(SLOW_S)
        connection.sendall(head % len(body) + body)
        assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 500")
    time.sleep(0.2)
    assert cpu_server.is_running


def test_batch_shares_the_error_when_an_element_is_said_to_be_longer_than_its_bytes(cpu_server: TritonServer) -> None:
    # A fault of Triton 2.51's Python backend that no model can see (docs/reliability.md): when this test fails, it has
    # been mended, and what is said of it can go.
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="TEXT", datatype="BYTES", shape=[1, 1])
    raw = struct.pack("<I", 100) + b"abc"
    bad = service_pb2.ModelInferRequest(model_name="encode", inputs=[tensor], raw_input_contents=[raw])

    async def run() -> list[Any]:
        async with (
            triton_aio.InferenceServerClient(cpu_server.grpc_url) as client,
            grpc.aio.insecure_channel(cpu_server.grpc_url) as channel,
        ):
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            calls = [client.infer("encode", [text_input(["good"])]) for _ in range(6)]
            return await asyncio.gather(infer(bad.SerializeToString()), *calls, return_exceptions=True)

    for _ in range(5):
        first, *others = asyncio.run(run())
        assert "incomplete string data" in str(first)
        if any("incomplete string data" in str(other) for other in others):
            break
    else:
        pytest.fail("no request shared the error")
    # And nothing is left of it.
    with triton.InferenceServerClient(cpu_server.grpc_url) as client:
        assert np.isfinite(client.infer("encode", [text_input(["good"])]).as_numpy("EMBEDDING")).all()
