"""The four ways to a server. They move requests and answers, and know nothing of texts, tasks or retries.

* `grpc_sync`      grpcio's channel and its futures
* `grpc_async`     grpc.aio
* `http_async`     aiohttp
* `http_sync`      the same aiohttp on an event loop in a thread of its own

All speak Triton's gRPC service through the protobufs of tritonclient (`grpc_messages`), or HTTP through `clients.wire`.
A failure is a TransportError: status name and message, made an EncoderError by the core.

Why not tritonclient's own clients: its HTTP one runs on gevent, is not to be shared between threads and has no deadline
of a call; its asyncio one is another library (aiohttp) with another interface. aiohttp alone serves both here, with a
deadline and cancellation for both; measured against httpx's successor on a loopback server: 0.48 against 1.30 ms a
request one after another, 0.24 against 1.70 ms with 32 at once, and 0.64 against 0.85 ms from synchronous code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from clients.connection import Address, Headers
from clients.failures import TransportError
from clients.wire import InferAnswer, InferRequest, Query

Outcome = InferAnswer | TransportError


class Call(Protocol):
    """A request under way."""

    def cancel(self) -> object:
        """Ends it; its outcome is CANCELLED, or whatever came first."""


class SyncTransport(Protocol):
    """What EncoderClient needs of a transport; used from any thread."""

    def send(self, request: InferRequest, timeout: float | None, done: Callable[[Outcome], None]) -> Call:
        """Sends a request; `done` gets its outcome, once, from a thread of the transport."""

    def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """Asks and waits. Raises TransportError."""

    def close(self) -> None:
        """Frees the connection; requests under way end as CANCELLED."""


class AsyncTransport(Protocol):
    """What AsyncEncoderClient needs of a transport; used from one event loop."""

    async def infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        """Sends a request and waits for its answer. Raises TransportError."""

    async def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """Asks and waits. Raises TransportError."""

    async def close(self) -> None:
        """Frees the connection."""


def check_process(home: int) -> None:
    """Refuses to go on in a process that was forked off since: the transport's threads were not copied with it.

    Args:
        home: os.getpid() where the transport was opened.

    Raises:
        RuntimeError: this is another process. Without it a call would wait for ever.
    """
    if os.getpid() != home:
        raise RuntimeError(
            f"the client was opened in process {home}, before this one was forked; make one in each process"
        )


def open_sync(address: Address, headers: Headers) -> SyncTransport:
    """The transport of an EncoderClient. Connects at the first request, not now."""
    if address.protocol == "http":
        from clients.transports.http_sync import HttpSync

        return HttpSync(address, headers)
    from clients.transports.grpc_sync import GrpcSync

    return GrpcSync(address, headers)


def open_async(address: Address, headers: Headers) -> AsyncTransport:
    """The transport of an AsyncEncoderClient, bound to the running event loop."""
    if address.protocol == "http":
        from clients.transports.http_async import HttpAsync

        return HttpAsync(address, headers)
    from clients.transports.grpc_async import GrpcAsync

    return GrpcAsync(address, headers)
