"""gRPC under asyncio."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from clients.connection import Address, Headers
from clients.transports.grpc_messages import (
    channel_options,
    credentials,
    failure,
    infer_message,
    question,
    read_infer,
    read_reply,
)
from clients.wire import InferAnswer, InferRequest, Query


class GrpcAsync:
    """One channel of grpc.aio, bound to the event loop it is made in. Cancelling a task cancels its call."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Prepares the channel; it connects at the first request."""
        self._headers = headers
        options, keys = channel_options(address), credentials(address)
        self._channel = (
            grpc.aio.insecure_channel(address.target, options)
            if keys is None
            else grpc.aio.secure_channel(address.target, keys, options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        """See AsyncTransport."""
        try:
            answer = await self._stub.ModelInfer(
                infer_message(request), timeout=timeout, metadata=(*self._headers, *request.headers)
            )
        except grpc.RpcError as error:
            raise failure(error) from None
        return read_infer(answer)

    async def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See AsyncTransport."""
        method, message = question(query)
        try:
            reply = await getattr(self._stub, method)(
                message, timeout=timeout, metadata=(*self._headers, *query.headers)
            )
        except grpc.RpcError as error:
            raise failure(error) from None
        return read_reply(query, reply)

    async def close(self) -> None:
        """See AsyncTransport."""
        await self._channel.close(None)
