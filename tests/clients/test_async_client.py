"""What only the asyncio client has: tasks that are cancelled, event loops that change."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from clients import AsyncEncoderClient
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
