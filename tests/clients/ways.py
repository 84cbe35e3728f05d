"""The four ways to call a server, behind the synchronous interface, so that one test speaks for all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from clients import AsyncEncoderClient, EncoderClient


class Blocking:
    """An AsyncEncoderClient on an event loop in a thread, with its methods made blocking."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = AsyncEncoderClient(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *arguments, **options: self._wait(method(*arguments, **options))

    def encode_batches(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        return self._each(self.client.encode_batches(*arguments, **options))

    def stop(self) -> None:
        self._wait(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _each(self, results: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._wait(anext(results))  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            self._wait(results.aclose())  # type: ignore[attr-defined]

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


@dataclass(frozen=True)
class Way:
    """A protocol and a kind of client."""

    protocol: str
    asynchronous: bool

    def __str__(self) -> str:
        return f"{self.protocol}{'-async' if self.asynchronous else ''}"

    def url(self, server: Any) -> str:
        """Of a FakeTriton or a TritonServer."""
        if self.protocol == "http":
            return str(server.http_url)
        return str(getattr(server, "grpc_url", None) or server.url)

    def at(self, address: str) -> str:
        """The url of host:port."""
        return f"http://{address}" if self.protocol == "http" else address

    @contextmanager
    def client(self, server: Any, **options: Any) -> Iterator[Any]:
        """A client of a server, or of a url."""
        url = server if isinstance(server, str) else self.url(server)
        if not self.asynchronous:
            with EncoderClient(url, **options) as client:
                yield client
            return
        blocking = Blocking(url, **options)
        try:
            yield blocking
        finally:
            blocking.stop()


WAYS = [Way(protocol, asynchronous) for protocol in ("grpc", "http") for asynchronous in (False, True)]
