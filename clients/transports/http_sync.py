"""HTTP from synchronous code: the asyncio transport, on an event loop in a thread of its own.

So a call from any thread has a deadline for all of it, can be cancelled on the way, and shares the kept-alive
connections: the blocking HTTP clients for Python offer one or two of the three.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
import weakref
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


class _Worker:
    """The event loop in its thread, and HttpAsync, which lives there. Knows nothing of its HttpSync."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Starts the thread; connects to nothing."""
        self._address, self._headers, self._home = address, headers, os.getpid()
        self._transport: HttpAsync | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="encoder-http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs it in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        """See AsyncTransport."""
        return await self._opened().infer(request, timeout)

    async def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See AsyncTransport."""
        return await self._opened().ask(query, timeout)

    def end(self) -> None:
        """Cancels what is under way, closes the connections and ends the thread, all in the thread itself."""
        self.submit(self._end())

    def wait(self) -> None:
        """Waits until it has ended, but not for ever."""
        # A callback of a request may close the client: a thread cannot wait for itself.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def abandon(self) -> None:
        """Ends for a client that nobody has closed: it is no more, or the interpreter ends."""
        if os.getpid() != self._home:  # forked off since: nothing of it is here
            return
        self.end()
        warnings.warn(f"a client of {self._address.url} was not closed", ResourceWarning, source=self, stacklevel=1)
        # Any thread may be the one that collects a client: it is not held up, unless it is the last there is.
        if not threading.main_thread().is_alive():
            self.wait()

    def _opened(self) -> HttpAsync:
        """The transport, made inside the loop by whoever comes first."""
        if self._transport is None:
            self._transport = HttpAsync(self._address, self._headers)
        return self._transport

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._transport is not None:
            await self._transport.close()
        self._loop.stop()


class HttpSync:
    """The loop's thread starts with the first request, and ends with `close` or when nobody has the client any more."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Keeps the address; nothing is started or contacted."""
        self._address, self._headers = address, headers
        self._lock = threading.Lock()
        self._home = os.getpid()
        self._worker: _Worker | None = None
        self._forgotten: weakref.finalize[[], HttpSync] | None = None
        self._closed = False

    def send(self, request: InferRequest, timeout: float | None, done: Callable[[Outcome], None]) -> Call:
        """See SyncTransport."""
        future = self._submit(lambda worker: worker.infer(request, timeout))
        future.add_done_callback(lambda ended: done(_outcome(ended)))
        return future

    def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See SyncTransport."""
        future = self._submit(lambda worker: worker.ask(query, timeout))
        try:
            return future.result()
        except CancelledError:
            raise TransportError("CANCELLED", "the client was closed") from None

    def close(self) -> None:
        """See SyncTransport."""
        if os.getpid() != self._home and self._worker is not None:
            self._closed = True  # nothing of it is here, and the lock may have been copied while it was held
            return
        with self._lock:
            if self._closed or self._worker is None or self._forgotten is None:
                self._closed = True
                return
            self._closed = True
            self._forgotten.detach()
            self._worker.end()
        self._worker.wait()

    def _submit(self, work: Callable[[_Worker], Coroutine[Any, Any, _T]]) -> Future[_T]:
        if self._worker is not None:
            check_process(self._home)
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._worker is None:
                self._home = os.getpid()
                self._worker = _Worker(self._address, self._headers)
                self._forgotten = weakref.finalize(self, self._worker.abandon)
            return self._worker.submit(work(self._worker))


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
