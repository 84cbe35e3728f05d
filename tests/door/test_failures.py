"""What the server's failures and the client's leaving become."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import openai
import pytest
from openai import OpenAI
from tritonclient.grpc import service_pb2_grpc

from builders.ports import free_ports
from tests.clients.fake_triton import FakeTriton, vector
from tests.door.doors import RunningDoor, running
from tests.tools.waiting import until

CODES = grpc.StatusCode


@pytest.mark.parametrize(
    ("failure", "status", "code", "again"),
    [
        ((CODES.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size"), 429, "overloaded", True),
        ((CODES.UNAVAILABLE, "the long lane holds 64 texts"), 429, "overloaded", True),
        ((CODES.RESOURCE_EXHAUSTED, "no capacity"), 429, "overloaded", True),
        ((CODES.UNAVAILABLE, "Request timeout expired"), 503, "queue_timeout", True),
        ((CODES.UNAVAILABLE, "'encode' is not at ready state"), 503, "server_unavailable", True),
        ((CODES.NOT_FOUND, "unknown model"), 503, "server_unavailable", True),
        ((CODES.UNAVAILABLE, "This protocol is restricted, expecting header 'x'"), 502, "server_failure", False),
        ((CODES.UNAUTHENTICATED, "no"), 502, "server_failure", False),
        ((CODES.INTERNAL, "the lane has died at 10.0.0.7"), 502, "server_failure", False),
        ((CODES.INVALID_ARGUMENT, "text 0 has 702 tokens; limit: 512; to do: cut it"), 400, "invalid_value", False),
    ],
)  # fmt: skip
def test_failure_of_the_server_becomes(
    door: RunningDoor,
    triton: FakeTriton,
    failure: tuple[grpc.StatusCode, str],
    status: int,
    code: str,
    again: bool,
) -> None:
    triton.fail = lambda texts: failure
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        reply = door.post(path, body)
        assert (reply.status, reply.error["code"]) == (status, code)
        assert ("retry-after" in reply.headers) == again
        assert triton.url not in reply.error["message"]
        assert "10.0.0.7" not in reply.error["message"]
    assert len(triton.seen) == 2, "the door tried again by itself"
    if status == 400:
        assert "702 tokens; limit: 512; to do: cut it" in reply.error["message"]


def test_failure_is_told_in_teis_form_on_its_paths(door: RunningDoor, triton: FakeTriton) -> None:
    for failure, kind, status in (
        ((CODES.UNAVAILABLE, "Exceeds maximum queue size"), "Overloaded", 429),
        ((CODES.UNAVAILABLE, "Request timeout expired"), "Unhealthy", 503),
        ((CODES.INTERNAL, "died"), "Backend", 502),
    ):
        triton.fail = lambda texts, failure=failure: failure  # type: ignore[misc]
        reply = door.post("/rerank", {"query": "a", "texts": ["b"]})
        assert (reply.status, reply.json["error_type"]) == (status, kind)


def test_openai_client_tries_again_by_itself_when_overloaded(triton: FakeTriton) -> None:
    times: list[float] = []

    def fail(texts: list[bytes]) -> tuple[grpc.StatusCode, str] | None:
        times.append(time.monotonic())
        return (CODES.UNAVAILABLE, "Exceeds maximum queue size") if len(times) == 1 else None

    triton.fail = fail
    with (
        running(triton.url, models="encode", retry_after_s=0.2) as door,
        OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=1) as client,
    ):
        assert len(client.embeddings.create(model="encode", input="a").data) == 1
    assert 0.2 <= times[1] - times[0] < 5


def test_deadline_ends_the_request_here_and_on_the_server(door: RunningDoor, triton: FakeTriton) -> None:
    triton.delay = lambda texts: 10.0
    began = time.monotonic()
    reply = door.embed(X_Deadline_Ms="100")
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began < 5
    assert triton.seen[0].remaining is not None
    assert triton.seen[0].remaining < 0.2
    assert until(lambda: triton.cancelled == 1)


def test_setting_bounds_the_deadline_of_a_header(triton: FakeTriton) -> None:
    with running(triton.url, models="encode", deadline_s=5, queue_timeout_s=2) as door:
        assert door.embed(X_Deadline_Ms="60000", X_Queue_Timeout_Ms="500").status == 200
        assert door.embed(X_Queue_Timeout_Ms="60000").status == 200
        for wrong in ("0", "-1", "soon", "1.5", "9" * 30):
            assert door.embed(X_Deadline_Ms=wrong).error["param"] == "x-deadline-ms"
    assert [one.parameters["timeout"] for one in triton.seen] == [500_000, 2_000_000]
    assert all(one.remaining is not None and one.remaining < 5.5 for one in triton.seen)


def test_client_that_goes_away_cancels_its_requests_on_the_server(
    door: RunningDoor, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "clients.door")
    triton.delay = lambda texts: 10.0
    connection = http.client.HTTPConnection("127.0.0.1", door.port)
    connection.request("POST", "/v1/embeddings", json.dumps({"input": ["a"] * 64}))
    assert until(lambda: len(triton.seen) == 2)
    connection.close()
    assert until(lambda: triton.cancelled == 2, 5)
    assert until(lambda: door.metric("door_requests_total", status="499") == 1)
    assert [one.door["status"] for one in caplog.records if one.message == "request"] == [499]  # type: ignore[attr-defined]
    assert door.metric("door_requests_in_flight") == 0


def test_server_that_is_not_there_is_unavailable_and_comes_back() -> None:
    port = free_ports().grpc
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(), server)
    with running(f"127.0.0.1:{port}", refresh_s=0.2) as door:
        for reply in (door.embed(), door.embed()):
            assert (reply.status, reply.error["code"]) == (503, "server_unavailable")
        assert door.get("/health").status == 503
        assert door.get("/health/live").status == 200
        assert door.get("/health/ready").status == 503
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            assert until(lambda: door.embed().status == 200)
            assert until(lambda: door.get("/health").status == 200)
            assert until(lambda: door.get("/health/ready").status == 200)
        finally:
            server.stop(0).wait()
        assert door.embed().error["code"] == "server_unavailable"


def test_openai_errors_are_typed(door: RunningDoor, triton: FakeTriton) -> None:
    triton.fail = lambda texts: (CODES.UNAVAILABLE, "Request timeout expired")
    with (
        OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.embeddings.create(model="encode", input="a")
    assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")


def test_many_clients_at_once_each_get_their_own(door: RunningDoor) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            text = f"text {number} {turn}"
            got = door.embed(text).json["data"][0]["embedding"]
            if got != pytest.approx(vector(text.encode()).tolist()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
