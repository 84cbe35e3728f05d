"""gRPC under asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from clients.connection import Address, Headers
from clients.failures import TransportError
from clients.transports.grpc_messages import (
    failure,
    infer_message,
    metadata,
    open_channel,
    question,
    read_infer,
    read_reply,
)
from clients.wire import InferAnswer, InferRequest, Query


class GrpcAsync:
    """One channel of grpc.aio, bound to the event loop it is made in. Cancelling a task cancels its call."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Prepares the channel; it connects at the first request."""
        self._headers, self._closed = headers, False
        self._channel = open_channel(grpc.aio, address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        """See AsyncTransport."""
        call = self._stub.ModelInfer(
            infer_message(request), timeout=timeout, metadata=metadata(self._headers, request.headers)
        )
        return read_infer(await self._ended(call))

    async def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See AsyncTransport."""
        method, message = question(query)
        call = getattr(self._stub, method)(message, timeout=timeout, metadata=metadata(self._headers, query.headers))
        return read_reply(query, await self._ended(call))

    async def close(self) -> None:
        """See AsyncTransport."""
        self._closed = True
        await self._channel.close(None)

    async def _ended(self, call: Awaitable[Any]) -> Any:
        """The reply of a call. Raises TransportError."""
        try:
            return await call
        except grpc.RpcError as error:
            raise failure(error) from None
        except asyncio.CancelledError:
            # To grpc.aio a call whose channel is closed is a cancelled task. Here nobody has cancelled the task, and
            # it would end without a word.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise TransportError("CANCELLED", "the client was closed") from None
            raise
