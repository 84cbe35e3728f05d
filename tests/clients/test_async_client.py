"""What only the asyncio client has: tasks that are cancelled, event loops that change."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import aclosing

import numpy as np
import pytest

from clients import AsyncEncoderClient, ServerUnavailable
from clients.connection import parse_address
from clients.failures import TransportError
from clients.transports.http_async import HttpAsync
from clients.wire import InferRequest, bytes_tensor
from tests.clients.fake_triton import FakeTriton, vector

PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http"])


def url(server: FakeTriton, protocol: str) -> str:
    return server.url if protocol == "grpc" else server.http_url


@PROTOCOLS
def test_cancelled_task_cancels_its_requests_and_leaves_the_client_usable(server: FakeTriton, protocol: str) -> None:
    server.delay = lambda texts: 0.0 if texts == [b"quick"] else 5.0

    async def run() -> None:
        async with AsyncEncoderClient(url(server, protocol), batch=1, concurrency=3) as client:
            task = asyncio.create_task(client.encode(["slow"] * 9))
            while len(server.seen) < 3:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await client.encode("quick")) == 1

    asyncio.run(run())
    ends = time.monotonic() + 2
    while server.cancelled < 3 and time.monotonic() < ends:
        time.sleep(0.005)
    assert (server.cancelled, len(server.seen)) == (3, 4)


@PROTOCOLS
def test_tasks_share_a_client_and_get_their_own_answers(server: FakeTriton, protocol: str) -> None:
    server.delay = lambda texts: len(texts[0]) % 3 * 0.005

    async def run() -> None:
        async with AsyncEncoderClient(url(server, protocol)) as client:
            texts = [f"{number} " * number for number in range(60)]
            results = await asyncio.gather(*(client.encode(text) for text in texts))
        for text, result in zip(texts, results, strict=True):
            np.testing.assert_array_equal(result.embeddings[0], vector(text.encode()))

    asyncio.run(run())


@PROTOCOLS
def test_client_says_that_it_belongs_to_another_event_loop(server: FakeTriton, protocol: str) -> None:
    client = AsyncEncoderClient(url(server, protocol))

    async def leave_open() -> None:
        await client.encode("a")

    async def use_again() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await client.encode("a")

    async def both() -> None:
        await leave_open()
        loop = asyncio.new_event_loop()
        try:
            await asyncio.to_thread(loop.run_until_complete, use_again())
        finally:
            loop.close()
            await client.close()

    asyncio.run(both())


@PROTOCOLS
def test_iterator_that_is_closed_early_leaves_no_request_under_way(server: FakeTriton, protocol: str) -> None:
    server.delay = lambda texts: 0.0 if texts == [b"0"] else 3.0

    async def run() -> int:
        async with AsyncEncoderClient(url(server, protocol), batch=1) as client:
            async with aclosing(client.encode_batches([str(number) for number in range(20)])) as results:  # type: ignore[type-var]
                await anext(results)
            return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(run()) == 0


@PROTOCOLS
def test_question_under_way_fails_when_the_client_is_closed_and_its_task_is_not_cancelled(protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        async def run() -> object:
            client = AsyncEncoderClient(address if protocol == "grpc" else f"http://{address}")
            asked = asyncio.create_task(client.facts())
            await asyncio.sleep(0.1)
            await client.close()
            (outcome,) = await asyncio.gather(asked, return_exceptions=True)
            return outcome

        assert isinstance(asyncio.run(run()), ServerUnavailable)


@pytest.mark.parametrize("left", [0.0, -0.5])
def test_request_whose_time_is_up_is_not_sent_over_http_without_any_limit(server: FakeTriton, left: float) -> None:
    async def run() -> None:
        transport = HttpAsync(parse_address(server.http_url, None, None), ())
        try:
            with pytest.raises(TransportError, match="DEADLINE_EXCEEDED"):
                await transport.infer(InferRequest("encode", (bytes_tensor("TEXT", [b"a"]),), {}), left)
        finally:
            await transport.close()

    asyncio.run(run())
    assert server.seen == []


@PROTOCOLS
def test_failed_call_leaves_no_task_behind(server: FakeTriton, protocol: str) -> None:
    import grpc

    from clients import ServerFailure

    server.fail = lambda texts: (grpc.StatusCode.INTERNAL, "boom") if texts == [b"1"] else None
    server.delay = lambda texts: 0.02 if texts == [b"1"] else 3.0

    async def run() -> int:
        async with AsyncEncoderClient(url(server, protocol), batch=1) as client:
            with pytest.raises(ServerFailure):
                await client.encode([str(number) for number in range(20)])
            return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(run()) == 0
