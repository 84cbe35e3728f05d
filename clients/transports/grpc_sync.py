"""gRPC from synchronous code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from clients.connection import Address, Headers
from clients.failures import TransportError
from clients.transports import Call, Outcome, check_process
from clients.transports.grpc_messages import (
    failure,
    infer_message,
    metadata,
    open_channel,
    question,
    read_infer,
    read_reply,
)
from clients.wire import InferRequest, Query


class GrpcSync:
    """One channel; grpcio's own threads deliver the outcomes."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Prepares the channel; it connects at the first request."""
        self._headers, self._home = headers, os.getpid()
        self._channel = open_channel(grpc, address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, request: InferRequest, timeout: float | None, done: Callable[[Outcome], None]) -> Call:
        """See SyncTransport."""
        check_process(self._home)
        call: Any = self._stub.ModelInfer.future(
            infer_message(request), timeout=timeout, metadata=metadata(self._headers, request.headers)
        )
        call.add_done_callback(lambda ended: done(_outcome(ended)))
        return call  # type: ignore[no-any-return]

    def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See SyncTransport."""
        check_process(self._home)
        method, message = question(query)
        try:
            reply = getattr(self._stub, method)(
                message, timeout=timeout, metadata=metadata(self._headers, query.headers)
            )
        except grpc.RpcError as error:
            raise failure(error) from None
        return read_reply(query, reply)

    def close(self) -> None:
        """See SyncTransport."""
        if os.getpid() == self._home:
            self._channel.close()


def _outcome(ended: Any) -> Outcome:
    """The outcome of a call that has ended; never raises, or its caller would wait for ever."""
    try:
        return read_infer(ended.result())
    except grpc.FutureCancelledError:
        return TransportError("CANCELLED", "the call was cancelled on this side")
    except grpc.RpcError as error:
        return failure(error)
    except TransportError as error:
        return error
    except Exception as error:
        return TransportError("INTERNAL", f"the answer cannot be read: {error!r}")
