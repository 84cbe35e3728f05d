"""What is sent again and what never, on the state of a call alone and over all four ways."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest

from clients import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    Retry,
    RetryPolicy,
    ServerUnavailable,
)
from clients.exchange import Exchange
from clients.failures import TransportError
from clients.retry import RetryBudget
from clients.wire import InferAnswer, InferRequest
from tests.clients.fake_triton import FakeTriton
from tests.clients.ways import Way

FULL = TransportError("UNAVAILABLE", "Exceeds maximum queue size")
ANSWER = InferAnswer("1", {})


def exchange(parts: int, *, concurrency: int = 2, ends: float | None = None, **policy: Any) -> Exchange:
    chosen = RetryPolicy(**policy)
    return Exchange(
        [range(number, number + 1) for number in range(parts)],
        lambda part: InferRequest("encode", (), {"part": part.start}),
        concurrency=concurrency,
        ends=ends,
        policy=chosen,
        budget=RetryBudget(chosen.budget),
        url="h:1",
    )


def test_answers_come_in_order_whatever_their_order() -> None:
    state = exchange(3, concurrency=3)
    assert [state.take(0.0)[0] for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
    state.settle(2, ANSWER, 0.0)
    assert list(state.ordered()) == []
    state.settle(0, ANSWER, 0.0)
    assert [one.texts for one in state.ordered()] == [range(0, 1)]
    state.settle(1, ANSWER, 0.0)
    assert [one.texts for one in state.ordered()] == [range(1, 2), range(2, 3)]
    assert state.finished


def test_refused_request_waits_twice_as_long_each_time_and_keeps_its_place() -> None:
    state = exchange(3, limit=3, first=1.0, longest=2.0)
    state.take(0.0)
    state.take(0.0)
    now = 0.0
    for least, most in ((0.5, 1.0), (1.0, 2.0), (1.0, 2.0)):
        state.settle(0, FULL, now)
        assert state.take(now) is None  # its place among the two is kept
        pause = state.pause(now)
        assert pause is not None
        assert least <= pause <= most
        now += pause
        taken = state.take(now)
        assert taken is not None
        assert taken[0] == 0
        assert state.pause(now) is None
    with pytest.raises(Overloaded) as caught:
        state.settle(0, FULL, now)
    assert (caught.value.retries, caught.value.texts) == (3, range(0, 1))


def test_retry_that_the_deadline_leaves_no_time_for_is_not_waited_for() -> None:
    state = exchange(1, ends=10.0, first=1.0)
    state.take(0.0)
    state.settle(0, FULL, 8.0)
    state.take(9.0)
    with pytest.raises(Overloaded):
        state.settle(0, FULL, 9.6)


def test_retries_of_a_client_end_with_its_budget_and_answers_give_it_back() -> None:
    budget = RetryBudget(2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "arguments", [{"limit": -1}, {"limit": 101}, {"first": 0}, {"longest": 0.01}, {"budget": 0}, {"limit": True}]
)
def test_policy_outside_its_limits_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        RetryPolicy(**arguments)


QUICK = {"first": 0.01, "longest": 0.05}


def failing(server: FakeTriton, times: int, failure: tuple[grpc.StatusCode, str]) -> None:
    """Lets the first requests of each text fail."""
    counts: dict[bytes, int] = {}
    lock = threading.Lock()

    def fail(texts: list[bytes]) -> tuple[grpc.StatusCode, str] | None:
        with lock:
            counts[texts[0]] = counts.get(texts[0], 0) + 1
            return failure if counts[texts[0]] <= times else None

    server.fail = fail


@pytest.mark.parametrize("message", ["Request timeout expired", "Exceeds maximum queue size", "the long lane is full"])
def test_refused_request_is_sent_again_and_counted(server: FakeTriton, way: Way, message: str) -> None:
    failing(server, 2, (grpc.StatusCode.UNAVAILABLE, message))
    told: list[Retry] = []
    with way.client(server, batch=1, retry=RetryPolicy(**QUICK, on_retry=told.append)) as client:
        result = client.encode(["a", "b"])
    assert (len(result), result.retries, len(server.seen)) == (2, 4, 6)
    assert sorted((one.texts.start, one.number) for one in told) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(isinstance(one.error, QueueTimeout | Overloaded) and 0 < one.delay <= 0.05 for one in told)


@pytest.mark.parametrize(
    "failure",
    [
        (grpc.StatusCode.INTERNAL, "boom"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (grpc.StatusCode.INVALID_ARGUMENT, "too long"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.NOT_FOUND, "unknown model"),
    ],
)
def test_request_that_may_have_been_computed_is_never_sent_again(
    server: FakeTriton, way: Way, failure: tuple[grpc.StatusCode, str]
) -> None:
    failing(server, 1, failure)
    with way.client(server, retry=RetryPolicy(limit=5, **QUICK)) as client, pytest.raises(EncoderError):
        client.encode("a")
    time.sleep(0.05)
    assert len(server.seen) == 1


def test_nothing_is_sent_again_without_a_policy(server: FakeTriton, way: Way) -> None:
    failing(server, 1, (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"))
    with way.client(server, retry=None) as client, pytest.raises(Overloaded) as caught:
        client.encode("a")
    assert (len(server.seen), caught.value.retries) == (1, 0)


def test_deadline_of_the_call_covers_its_retries(server: FakeTriton, way: Way) -> None:
    failing(server, 100, (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"))
    with way.client(server, retry=RetryPolicy(limit=100, budget=1000, first=0.05, longest=0.05)) as client:
        began = time.monotonic()
        with pytest.raises((Overloaded, DeadlineExceeded)) as caught:
            client.encode("a", deadline=0.3)
        assert 0.2 < time.monotonic() - began < 0.6
    assert caught.value.retries >= 2  # some five on a quiet machine


def test_connection_that_was_refused_is_tried_again(way: Way) -> None:
    told: list[Retry] = []
    policy = RetryPolicy(limit=2, on_retry=told.append, **QUICK)
    with way.client(way.at("127.0.0.1:1"), retry=policy) as client, pytest.raises(ServerUnavailable) as caught:
        client.encode("a")
    assert (caught.value.retries, len(told)) == (2, 2)
