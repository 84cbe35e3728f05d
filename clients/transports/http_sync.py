"""HTTP from synchronous code: the asyncio transport, on an event loop in a thread of its own.

So a call from any thread has a deadline for all of it, can be cancelled on the way, and shares the kept-alive
connections: the blocking HTTP clients for Python offer one or two of the three.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from clients.connection import Address, Headers
from clients.failures import TransportError
from clients.transports import Call, Outcome, check_process
from clients.transports.http_async import HttpAsync
from clients.wire import InferAnswer, InferRequest, Query

_T = TypeVar("_T")
_CLOSE_S = 5.0


class HttpSync:
    """The loop's thread starts with the first request and ends with `close`."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Keeps the address; nothing is started or contacted."""
        self._address, self._headers = address, headers
        self._lock = threading.Lock()
        self._home = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._transport: HttpAsync | None = None
        self._closed = False

    def send(self, request: InferRequest, timeout: float | None, done: Callable[[Outcome], None]) -> Call:
        """See SyncTransport."""
        future = self._submit(self._infer(request, timeout))
        future.add_done_callback(lambda ended: done(_outcome(ended)))
        return future

    def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See SyncTransport."""
        future = self._submit(self._ask(query, timeout))
        try:
            return future.result()
        except CancelledError:
            raise TransportError("CANCELLED", "the client was closed") from None

    def close(self) -> None:
        """See SyncTransport."""
        if os.getpid() != self._home and self._loop is not None:
            self._closed = True  # nothing of it is here, and the lock may have been copied while it was held
            return
        with self._lock:
            if self._closed or self._loop is None or self._thread is None:
                self._closed = True
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        # A callback of a request may close the client: a thread cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._loop is not None:
            try:
                check_process(self._home)
            except RuntimeError:
                work.close()
                raise
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError("the client is closed")
            if self._loop is None:
                self._home = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="encoder-http", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _opened(self) -> HttpAsync:
        """The transport, made inside the loop by whoever comes first."""
        if self._transport is None:
            self._transport = HttpAsync(self._address, self._headers)
        return self._transport

    async def _infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        return await self._opened().infer(request, timeout)

    async def _ask(self, query: Query, timeout: float) -> dict[str, Any]:
        return await self._opened().ask(query, timeout)

    async def _end(self) -> None:
        """Cancels what is under way, waits until it has ended, closes the connections and stops the loop."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()
        asyncio.get_running_loop().stop()


def _outcome(ended: Future[InferAnswer]) -> Outcome:
    """The outcome of a request that has ended; never raises, or its caller would wait for ever."""
    try:
        return ended.result()
    except CancelledError:
        return TransportError("CANCELLED", "the call was cancelled on this side")
    except TransportError as error:
        return error
    except Exception as error:
        return TransportError("INTERNAL", f"the answer cannot be read: {error!r}")
