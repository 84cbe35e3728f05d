"""Both clients over both protocols against a server that speaks Triton's (see fake_triton)."""

import dataclasses
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from clients import (
    DeadlineExceeded,
    EncoderClient,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerFailure,
    ServerUnavailable,
)
from tests.clients.fake_triton import DIM, FakeTriton, serve, vector
from tests.clients.ways import Way


def vectors(texts: list[str]) -> np.ndarray:
    return np.stack([vector(text.encode()) for text in texts])


# Results


def test_one_str_gives_one_row(client: EncoderClient) -> None:
    result = client.encode("a text of 23 characters")
    assert (result.embeddings.shape, result.embeddings.dtype) == ((1, DIM), np.float32)
    assert (result.tokens.tolist(), result.tokens.dtype) == ([23], np.int32)
    assert (result.cut.tolist(), result.cut.dtype) == ([2], np.int32)


def test_hundred_texts_keep_their_order_under_random_delays(client: EncoderClient, server: FakeTriton) -> None:
    texts = [f"text {i}" for i in range(100)]
    pauses = random.Random(7)
    server.delay = lambda _: pauses.uniform(0, 0.1)
    result = client.encode(texts)
    np.testing.assert_array_equal(result.embeddings, vectors(texts))
    assert result.tokens.tolist() == [len(text) for text in texts]
    assert sorted(len(seen.texts) for seen in server.seen) == [4, 32, 32, 32]
    assert all(seen.shape == [len(seen.texts), 1] for seen in server.seen)


def test_order_is_kept_when_the_first_request_is_the_last_to_be_answered(
    client: EncoderClient, server: FakeTriton
) -> None:
    texts = [f"text {i}" for i in range(100)]
    server.delay = lambda part: 0.2 if part[0] == b"text 0" else 0.0
    np.testing.assert_array_equal(client.encode(texts).embeddings, vectors(texts))


def test_result_has_a_length_and_iterates_by_text(client: EncoderClient) -> None:
    result = client.encode(["a", "bc"])
    assert len(result) == 2
    assert [(one.embedding.shape, one.tokens, one.cut) for one in result] == [((DIM,), 1, 0), ((DIM,), 2, 0)]
    assert all(type(one.tokens) is int for one in result)


def test_arrays_are_the_callers_own_and_the_result_is_frozen(client: EncoderClient) -> None:
    result = client.encode(["a"])
    result.embeddings[0, 0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.tokens = result.cut  # type: ignore[misc]


def test_no_texts_give_an_empty_result_that_can_be_stacked(client: EncoderClient, server: FakeTriton) -> None:
    result = client.encode([])
    assert (result.embeddings.shape, result.tokens.shape, result.cut.shape) == ((0, DIM), (0,), (0,))
    assert np.concatenate([result.embeddings, client.encode("a").embeddings]).shape == (1, DIM)
    assert len(server.seen) == 1  # nothing was computed for the empty one
    assert list(client.encode_batches([])) == []


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b\0\0", "é ü 漢字 🚀\u2028", "e\u0301", "line\nbreak\r\n", "x" * 200_000]
)
def test_text_arrives_byte_for_byte(client: EncoderClient, server: FakeTriton, text: str) -> None:
    client.encode([text, "other"])
    assert server.seen[0].texts == [text.encode(), b"other"]


def test_numpy_strings_and_tuples_are_texts(client: EncoderClient, server: FakeTriton) -> None:
    client.encode(np.array(["a", "b"]))  # type: ignore[arg-type]
    client.encode(("a", "b"))
    assert [seen.texts for seen in server.seen] == [[b"a", b"b"]] * 2


def test_numbers_may_be_numpys(server: FakeTriton, way: Way) -> None:
    with way.client(server, batch=np.int64(2), concurrency=np.int32(1)) as client:
        client.encode(["a", "b", "c"], priority=np.int64(1), timeout=np.float32(0.5), dimensions=np.int16(4))
    assert [len(seen.texts) for seen in server.seen] == [2, 1]
    assert server.seen[0].parameters["priority"] == 1
    assert server.seen[0].parameters["dimensions"] == 4


def test_encode_batches_yields_each_request_and_stops_when_left(server: FakeTriton, way: Way) -> None:
    with way.client(server, batch=2, concurrency=1) as client:
        assert [len(result) for result in client.encode_batches(["t"] * 5)] == [2, 2, 1]
        server.seen.clear()
        batches = client.encode_batches(["t"] * 100)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert len(server.seen) <= 2


# What goes over the wire


@pytest.mark.parametrize(("priority", "sent"), [("interactive", 1), ("background", 2), (1, 1), (2, 2), (None, None)])
def test_priority_is_sent_as_its_number(
    client: EncoderClient, server: FakeTriton, priority: object, sent: int | None
) -> None:
    client.encode("a", priority=priority)  # type: ignore[arg-type]
    assert server.seen[0].parameters.get("priority") == sent


@pytest.mark.parametrize(("seconds", "sent"), [(0.2, 200_000), (5, 5_000_000), (1e-9, 1), (None, None)])
def test_timeout_is_sent_in_microseconds(
    client: EncoderClient, server: FakeTriton, seconds: float | None, sent: int | None
) -> None:
    client.encode("a", timeout=seconds)
    assert server.seen[0].parameters.get("timeout") == sent


def test_truncate_model_and_deadline_are_sent(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="other") as client:
        client.encode("a")
        client.encode("a", truncate="error", deadline=5)
    first, second = server.seen
    assert (first.parameters, first.model) == ({"truncate": "end"}, "other")
    assert (second.parameters, second.model) == ({"truncate": "error"}, "other")
    if way.protocol == "grpc":  # HTTP tells the server nothing of it
        assert second.remaining is not None
        assert 4 < second.remaining < 5.1  # gRPC rounds it up


def test_requests_in_flight_stay_within_the_bound(server: FakeTriton, way: Way) -> None:
    server.delay = lambda _: 0.02
    with way.client(server, batch=1, concurrency=3) as client:
        client.encode([str(i) for i in range(20)])
    assert server.most_at_once == 3


def test_one_client_serves_many_threads(client: EncoderClient, server: FakeTriton) -> None:
    server.delay = lambda texts: len(texts[0]) % 3 * 0.005
    wrong: list[object] = []

    def work(thread: int) -> None:
        for turn in range(5):
            texts = [f"{thread} {turn} {i}" for i in range(1 + 9 * thread)]
            if not np.array_equal(client.encode(texts).embeddings, vectors(texts)):
                wrong.append((thread, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(server.seen) == 5 * sum(-(-(1 + 9 * i) // 32) for i in range(8))


def test_nothing_is_printed(client: EncoderClient, capfd: pytest.CaptureFixture[str]) -> None:
    client.encode(["a"] * 40)
    client.ready()
    assert capfd.readouterr() == ("", "")


# Failures


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "too long", InvalidInput),
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", QueueTimeout),
        (grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size", Overloaded),
        (grpc.StatusCode.UNAVAILABLE, "the long lane is full", Overloaded),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'encode' is not found", ServerUnavailable),
        (grpc.StatusCode.CANCELLED, "cancelled", ServerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, "boom", ServerFailure),
    ],
)
def test_failure_of_the_server_arrives_as_its_kind(
    client: EncoderClient, server: FakeTriton, code: grpc.StatusCode, message: str, kind: type[EncoderError]
) -> None:
    server.fail = lambda _: (code, message)
    with pytest.raises(EncoderError) as caught:
        client.encode(["a", "b"])
    assert type(caught.value) is kind
    # A proxy's 429 and Triton's own codes over HTTP are given as the statuses they stand for.
    assert caught.value.status == code.name
    assert caught.value.texts == range(0, 2)
    assert caught.value.url == client.url


def test_first_failure_names_its_texts_cancels_the_rest_and_leaves_the_client_usable(
    server: FakeTriton, way: Way
) -> None:
    server.fail = lambda texts: (grpc.StatusCode.INTERNAL, "boom") if texts[0] == b"4" else None
    server.delay = lambda texts: 0.05 if texts[0] == b"4" else 5.0
    with way.client(server, batch=2, concurrency=4) as client:
        started = time.monotonic()
        with pytest.raises(ServerFailure, match=r"texts 4 to 5: .*boom") as caught:
            client.encode([str(i) for i in range(40)])
        assert time.monotonic() - started < 1
        assert caught.value.texts == range(4, 6)
        time.sleep(0.1)
        assert len(server.seen) == 4
        assert server.cancelled == 3
        server.delay = lambda _: 0.0
        assert len(client.encode("a")) == 1


@pytest.mark.parametrize(("bad", "texts"), [(35, 46), (0, 1), (44, 45)])
def test_text_the_server_refuses_is_named_by_its_position_in_the_call(
    client: EncoderClient, server: FakeTriton, bad: int, texts: int
) -> None:
    server.fail = lambda part: (
        (grpc.StatusCode.INVALID_ARGUMENT, f"text {part.index(b'bad')} has 602 tokens; limit: 512")
        if b"bad" in part
        else None
    )
    with pytest.raises(InvalidInput) as caught:
        client.encode(["bad" if i == bad else "good" for i in range(texts)])
    assert str(caught.value) == f"text {bad} has 602 tokens; limit: 512; server: {client.url}"
    assert caught.value.texts == range(bad, bad + 1)


def test_error_too_long_for_grpcs_headers_is_not_to_be_tried_again(server: FakeTriton) -> None:
    server.fail = lambda _: (grpc.StatusCode.INVALID_ARGUMENT, "x" * 100_000)
    with (
        EncoderClient(server.url) as client,
        pytest.raises(InvalidInput, match=r"too large: .*metadata size exceeds") as caught,
    ):
        client.encode("a")
    assert (caught.value.status, caught.value.safe_to_retry) == ("RESOURCE_EXHAUSTED", False)


def test_refused_connection_names_url_and_remedy_at_once(way: Way) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = way.at(f"127.0.0.1:{free.getsockname()[1]}")
        started = time.monotonic()
        with way.client(url) as client, pytest.raises(ServerUnavailable) as caught:
            client.encode("a")
        assert time.monotonic() - started < 2
    assert caught.value.safe_to_retry
    assert f"server: {url}; to do: start the server" in str(caught.value)


def test_client_finds_a_server_that_starts_later() -> None:
    with serve() as fake:
        url = fake.url
    with EncoderClient(url) as client:  # gRPC: its channel has a back-off of its own
        for _ in range(3):
            assert not client.ready()
        server = grpc.server(ThreadPoolExecutor(2))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(), server)
        server.add_insecure_port(url)
        server.start()
        deadline = time.monotonic() + 3
        while not client.ready() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(client.encode("a")) == 1
        server.stop(0).wait()


def test_deadline_ends_the_whole_call(server: FakeTriton, way: Way) -> None:
    server.delay = lambda _: 0.15
    with way.client(server, batch=1, concurrency=1) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            client.encode(["a"] * 10, deadline=0.4)
        assert 0.35 < time.monotonic() - started < 1
    # The one that was under way: the third, or on a busy machine the second.
    assert caught.value.texts in (range(1, 2), range(2, 3))
    assert not caught.value.safe_to_retry


def test_deadline_that_passes_between_batches_names_what_was_not_sent(server: FakeTriton, way: Way) -> None:
    with way.client(server, batch=1, concurrency=1) as client:
        batches = client.encode_batches(["a"] * 3, deadline=0.2)
        next(batches)
        time.sleep(0.3)
        with pytest.raises(DeadlineExceeded, match=r"text 1: .*before these were sent"):
            next(batches)


@pytest.mark.parametrize("texts", [b"bytes", 5, None, object()])
def test_texts_that_are_no_sequence_of_str_are_refused(client: EncoderClient, texts: object) -> None:
    with pytest.raises(InvalidInput, match="a str or a sequence of str"):
        client.encode(texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [None, 5, b"bytes", ["a"], float("nan")])
def test_item_that_is_no_str_is_refused_with_its_index_before_anything_is_sent(
    client: EncoderClient, server: FakeTriton, item: object
) -> None:
    with pytest.raises(InvalidInput, match="text 70: not a str but") as caught:
        client.encode(["a"] * 70 + [item] + ["b"] * 9)  # type: ignore[list-item]
    assert caught.value.texts == range(70, 71)
    assert server.seen == []


def test_lone_surrogate_is_refused_with_its_index(client: EncoderClient, server: FakeTriton) -> None:
    with pytest.raises(InvalidInput, match=r"text 1: cannot be UTF-8: lone surrogate at character 2: '\\ud800'"):
        client.encode(["a", "xx\ud800"])
    assert server.seen == []


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 0},
        {"priority": 3},
        {"priority": True},
        {"priority": 1.0},
        {"priority": "high"},
        {"priority": []},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": 200_000},
        {"timeout": "1"},
        {"timeout": True},
        {"deadline": 0},
        {"deadline": float("inf")},
        {"truncate": "middle"},
        {"truncate": None},
        {"overlap": 4},
        {"overlap": -1, "truncate": "chunk"},
        {"overlap": 1.5, "truncate": "chunk"},
        {"dimensions": 0},
        {"prompt": 3},
        {"progress": "yes"},
    ],
)
def test_option_outside_its_limits_is_refused(
    client: EncoderClient, server: FakeTriton, options: dict[str, object]
) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidInput, match=f"{name}.*limit: "):
        client.encode("a", **options)  # type: ignore[arg-type]
    assert server.seen == []


@pytest.mark.parametrize(
    "arguments",
    [{"batch": 0}, {"batch": 1025}, {"batch": 1.5}, {"concurrency": 0}, {"concurrency": True}, {"model": ""}],
)
def test_argument_of_the_client_outside_its_limits_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        EncoderClient(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [("TOKENS", "CUT"), ("EMBEDDING", "CUT")])
def test_answer_without_an_output_is_a_server_failure(
    client: EncoderClient, server: FakeTriton, outputs: tuple[str, ...]
) -> None:
    server.outputs = outputs
    with pytest.raises(ServerFailure, match=r"the answer's (EMBEDDING|TOKENS) is not"):
        client.encode("a")


def test_answers_of_different_dim_are_a_server_failure(client: EncoderClient, server: FakeTriton) -> None:
    server.dim = lambda texts: 8 if len(texts) == 32 else 4
    with pytest.raises(ServerFailure, match=r"different dim: \[4, 8\]"):
        client.encode(["a"] * 33)


# Life of the client


def test_ready_says_what_the_server_says(client: EncoderClient, server: FakeTriton) -> None:
    assert client.ready()
    server.ready = False
    assert not client.ready()


def test_ready_is_false_without_a_server(way: Way) -> None:
    with way.client(way.at("127.0.0.1:1")) as client:
        started = time.monotonic()
        assert not client.ready()
        assert time.monotonic() - started < 2


def test_dim_comes_from_the_model_and_fails_without_embeddings(client: EncoderClient, server: FakeTriton) -> None:
    assert client.dim() == DIM
    server.outputs = ("TOKENS",)
    with pytest.raises(ServerFailure, match="states no length"):
        client.dim()


def test_dim_is_the_longest_when_requests_choose_among_several(client: EncoderClient, server: FakeTriton) -> None:
    server.dimensions = (2, 4, 8)
    assert (client.dim(), client.facts().size, client.facts().dimensions) == (8, 8, (2, 4, 8))
    assert client.encode([]).embeddings.shape == (0, 8)


def test_closed_client_says_so(server: FakeTriton, way: Way) -> None:
    with way.client(server) as client:
        assert client.ready()
        client.close()
        client.close()
        for call in (client.ready, client.dim, lambda: client.encode("a"), lambda: list(client.encode_batches("a"))):
            with pytest.raises(RuntimeError, match="closed"):
                call()


def test_call_that_meets_the_close_of_another_thread_says_so(
    server: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EncoderClient(server.url)
    for name, call in (("send", lambda: client.encode("a")), ("ask", client.facts)):
        kept = getattr(client._transport, name)

        def closing(*arguments: object, kept: Callable[..., object] = kept) -> object:
            client.close()
            return kept(*arguments)

        client._closed = False
        monkeypatch.setattr(client._transport, name, closing)
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_client_says_that_it_was_opened_before_the_process_was_forked(server: FakeTriton, protocol: str) -> None:
    with EncoderClient(server.url if protocol == "grpc" else server.http_url) as client:
        client.encode("a")
        child = os.fork()
        if not child:  # without the check it would wait for threads that were not copied
            code = 1
            try:
                client.encode("a")
            except RuntimeError as error:
                code = 0 if "make one in each process" in str(error) else 2
            finally:
                client.close()
                os._exit(code)
        ends = time.monotonic() + 10
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
        assert len(client.encode("b")) == 1


def test_close_ends_the_calls_of_other_threads(server: FakeTriton, client: EncoderClient) -> None:
    server.delay = lambda _: 5.0
    caught: list[Exception] = []

    def work() -> None:
        try:
            client.encode("a")
        except EncoderError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not server.seen:
        time.sleep(0.005)
    client.close()
    thread.join(2)
    assert not thread.is_alive()
    assert [type(error) for error in caught] == [ServerUnavailable]
