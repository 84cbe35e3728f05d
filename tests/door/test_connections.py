"""Clients that mean no good: heads without end, bodies that trickle, answers nobody reads, JSON made to hurt."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from clients.door.connection import Connection
from clients.door.token_ids import MOST
from tests.clients.fake_triton import FakeTriton
from tests.door.doors import Reply, RunningDoor, running
from tests.door.test_embeddings import small_tokenizer
from tests.tools.waiting import until


@contextmanager
def connected(door: RunningDoor) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", door.port), timeout=10) as made:
        yield made


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the door closes; a reset is an end too."""
    pieces = []
    try:
        while piece := connection.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def cut_after(connection: socket.socket, pieces: list[bytes]) -> float:
    """Seconds until the door cuts a client off that sends a piece every 20 ms."""
    began = time.monotonic()
    for piece in pieces:
        try:
            connection.sendall(piece)
        except OSError:
            return time.monotonic() - began
        time.sleep(0.02)
    pytest.fail("the door never cut it off")


def request(body: bytes, *lines: str) -> bytes:
    head = ["POST /v1/embeddings HTTP/1.1", "Host: door", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


BODY = json.dumps({"model": "encode", "input": "a"}).encode()


# Heads


def test_connection_is_closed_when_its_head_does_not_come(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", head_timeout_s=0.2) as door:
        for sent in (b"", b"\r\n\r\n", b"POST /v1/emb", b"POST /v1/embeddings HTTP/1.1\r\nHost: d\r\nX-"):
            with connected(door) as connection:
                began = time.monotonic()
                connection.sendall(sent)
                assert read_to_end(connection) == b""
                assert 0.1 < time.monotonic() - began < 5


def test_head_that_trickles_is_not_given_more_time_by_each_byte(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", head_timeout_s=0.3) as door, connected(door) as connection:
        connection.sendall(request(BODY))  # a good request first: the next head is bounded, too
        assert b" 200 " in connection.recv(65_536)
        head = b"GET /v1/models HTTP/1.1\r\n" + b"X-Header: value\r\n" * 100
        assert cut_after(connection, [bytes([byte]) for byte in head]) < 5


def test_connection_is_closed_when_a_refused_body_goes_on_and_on(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", head_timeout_s=0.3) as door, connected(door) as connection:
        connection.sendall(request(b"", "Content-Type: text/plain").replace(b"Length: 0", b"Length: 100000"))
        assert b" 415 " in connection.recv(65_536)
        assert cut_after(connection, [b"x" * 100] * 500) < 5


def test_request_under_way_is_answered_when_the_next_head_is_late(triton: FakeTriton) -> None:
    triton.delay = lambda texts: 0.6
    with running(triton.url, models="encode", head_timeout_s=0.2) as door, connected(door) as connection:
        connection.sendall(request(BODY) + b"GET /v1/mod")
        assert b" 200 " in read_to_end(connection)


def test_head_is_refused_when_it_is_too_large(shared: tuple[RunningDoor, FakeTriton]) -> None:
    with connected(shared[0]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        sent = 0
        try:
            while sent < 100 << 20:
                connection.sendall(b"X-Header: " + b"x" * 10_000 + b"\r\n")
                sent += 10_012
        except OSError:
            pass
        answer = read_to_end(connection)
        assert answer == b"" or b" 431 " in answer  # a reset may overtake it
        assert sent < 16 << 20, "what the sockets hold, and no more"
    assert shared[0].get("/health/live").status == 200


def test_upgrade_to_another_protocol_is_not_taken(shared: tuple[RunningDoor, FakeTriton]) -> None:
    asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert shared[0].get("/v1/models", **asked).status == 200


# Answers


def test_connection_is_cut_when_its_client_does_not_read(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "read_s", 1.0)  # longer than a busy machine lets a reader stand still
    triton.dim = lambda texts: 4096
    body = json.dumps({"input": ["a"] * 512}).encode()  # an answer of 20 MB: more than the sockets hold
    with running(triton.url, models="encode", head_timeout_s=0.5) as door:
        with connected(door) as connection:
            connection.sendall(request(body))
            assert until(lambda: door.metric("door_requests_total", status="200") == 1)
            time.sleep(2.0)
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 200")
            assert len(answer) < 20_000_000
        with connected(door) as connection:  # who reads, though slowly, gets it
            connection.sendall(request(body, "Connection: close"))
            answer = b""
            while piece := connection.recv(1 << 20):
                answer += piece
                time.sleep(0.01)
            assert len(json.loads(answer.split(b"\r\n\r\n", 1)[1])["data"]) == 512


# Bodies


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"]
)
def test_body_is_refused_when_it_is_said_to_be_something_else(
    shared: tuple[RunningDoor, FakeTriton], kind: str
) -> None:
    reply = shared[0].embed(Content_Type=kind)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (415, "unsupported_media_type", "content-type")
    assert shared[1].seen == []


def test_body_is_read_when_it_is_json_or_nothing_is_said(door: RunningDoor) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/ld+json", ""):
        assert door.embed(Content_Type=kind).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": ' + b"[" * 100_000,
        b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 100_000,
        b'{"input": NaN}',
        b'{"input": [Infinity]}',
        b'{"input": [1e400]}',
        b'{"input": [' + b"9" * 5000 + b"]}",
        b'{"input": [1.0]}',
        b'{"input": "a", "dimensions": 1e2}',
        b'{"input": "a"} {"input": "b"}',
        b'{"input": [' + b"[]," * 300_000 + b"[]]}",
        b"",
        b"null",
    ],
    ids=lambda body: body[:16].decode(),
)
def test_json_made_to_hurt_is_refused_at_once(shared: tuple[RunningDoor, FakeTriton], body: bytes) -> None:
    began = time.monotonic()
    reply = shared[0].call("POST", "/v1/embeddings", body, Content_Type="application/json")
    assert reply.status == 400
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert len(reply.body) < 1000
    assert time.monotonic() - began < 5
    assert shared[1].seen == []


def test_one_text_more_than_2048_is_refused_and_2048_are_not(door: RunningDoor) -> None:
    reply = door.embed(["a"] * 2049)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "has 2049 items; limit: 2048" in reply.error["message"]
    assert len(door.embed(["a"] * 2048).json["data"]) == 2048


def test_body_without_length_is_read_in_the_smallest_pieces(door: RunningDoor) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=10)
    pieces = iter([bytes([byte]) for byte in BODY])
    connection.request("POST", "/v1/embeddings", pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


def test_bodies_together_are_bounded_and_what_they_took_is_given_back(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", max_body_bytes=2048, max_bodies_bytes=2048, retry_after_s=2) as door:
        with connected(door) as slow:
            slow.sendall(request(b"x" * 2000)[:-100])
            assert until(lambda: overloaded(door.embed("y" * 500)))
            reply = door.embed("y" * 500)
            assert (reply.status, reply.headers["retry-after"]) == (429, "2")
        assert until(lambda: door.embed("y" * 500).status == 200)
        for _ in range(20):  # refused, answered, too large: nothing is kept of any of them
            assert door.call("POST", "/v1/embeddings", b"x" * 2000).status == 400
            assert door.call("POST", "/v1/embeddings", b"x" * 3000).status == 413
            assert door.embed("y" * 1900).status == 200


def overloaded(reply: Reply) -> bool:
    return reply.status == 429 and reply.error["code"] == "overloaded"


# Values


def test_values_that_are_no_numbers_are_a_failure_of_the_server(
    door: RunningDoor, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, wrong = triton._arrays, [0.0]

    def spoilt(seen: Any) -> Any:
        arrays = given(seen)
        for name in ("EMBEDDING", "SCORES"):
            if name in arrays:
                arrays[name][1][-1, -1] = wrong[0]
        return arrays

    monkeypatch.setattr(triton, "_arrays", spoilt)
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
        ("/v1/classify", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/predict", {"inputs": "a"}),
    ):
        for wrong[0], status in ((0.5, 200), (float("nan"), 502), (float("inf"), 502)):
            assert door.post(path, body).status == status


def test_more_token_ids_than_any_model_reads_are_refused_before_they_are_read(triton: FakeTriton) -> None:
    with small_tokenizer() as path, running(triton.url, models="encode", tokenizer=path) as door:
        assert door.embed([4] * 100).status == 200
        reply = door.embed([4] * (MOST + 1))
        assert (reply.status, reply.error["param"]) == (400, "input")
        assert f"has {MOST + 1} token ids; limit: {MOST}" in reply.error["message"]
        assert door.embed([2**62]).status == door.embed([2**64]).status == 400


def test_door_answers_others_while_it_reads_many_token_ids(triton: FakeTriton) -> None:
    with small_tokenizer() as path, running(triton.url, models="encode", tokenizer=path) as door:
        with ThreadPoolExecutor(1) as pool:
            ids = [[4, 5] * 20_000] * 20  # 800,000 ids
            slow = pool.submit(door.embed, ids)
            waits = []
            while not slow.done():
                began = time.monotonic()
                assert door.get("/health/live").status == 200
                waits.append(time.monotonic() - began)
        assert slow.result().status == 200
        assert max(waits) < 1
