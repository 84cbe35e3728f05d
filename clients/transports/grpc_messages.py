"""Requests and answers as Triton's gRPC messages, and what both gRPC transports share."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import MAX_GRPC_MESSAGE_SIZE, service_pb2

from clients.connection import Address, Headers
from clients.failures import TransportError
from clients.wire import InferAnswer, InferRequest, Query, read_array

CHANNEL = (
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE),
    # Without these a channel that once failed to connect fails every call for up to two minutes, server up or not.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A client's connection is its own: closing it frees it, and no other client's back-off holds it up.
    ("grpc.use_local_subchannel_pool", 1),
)

#: Targets that stand for all addresses they resolve to.
_SEVERAL = ("dns:", "ipv4:", "ipv6:")

#: Method of Triton's service and its request message, by kind of question.
_QUESTIONS = {
    "live": ("ServerLive", "ServerLiveRequest"),
    "ready": ("ModelReady", "ModelReadyRequest"),
    "server": ("ServerMetadata", "ServerMetadataRequest"),
    "metadata": ("ModelMetadata", "ModelMetadataRequest"),
    "config": ("ModelConfig", "ModelConfigRequest"),
    "statistics": ("ModelStatistics", "ModelStatisticsRequest"),
    "index": ("RepositoryIndex", "RepositoryIndexRequest"),
}


def channel_options(address: Address) -> list[tuple[str, Any]]:
    """The channel's arguments."""
    options: list[tuple[str, Any]] = list(CHANNEL)
    if address.tls and address.tls.server_name:
        options.append(("grpc.ssl_target_name_override", address.tls.server_name))
    if address.target.startswith(_SEVERAL):
        # Each server behind the name in turn; by itself gRPC keeps to the first that answers.
        options.append(("grpc.lb_policy_name", "round_robin"))
    return options


def credentials(address: Address) -> Any:
    """grpc.ChannelCredentials of an encrypted channel; None for a plain one."""
    if address.tls is None:
        return None
    root, key, certificate = address.tls.pems()
    return grpc.ssl_channel_credentials(root, key, certificate)


def open_channel(library: Any, address: Address) -> Any:
    """A channel of `grpc` or `grpc.aio`; it connects at the first request."""
    options, keys = channel_options(address), credentials(address)
    if keys is None:
        return library.insecure_channel(address.target, options)
    return library.secure_channel(address.target, keys, options)


def metadata(own: Headers, call: Headers) -> Headers:
    """The headers of a request: the client's own, and in place of those of the same name the call's."""
    return tuple({**dict(own), **dict(call)}.items())


def infer_message(request: InferRequest) -> Any:
    """The ModelInferRequest."""
    message = service_pb2.ModelInferRequest(model_name=request.model)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for name, value in request.parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, str):
            parameter.string_param = value
        elif name == "priority":  # the type Triton's own client gives it
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    return message


def read_infer(message: Any) -> InferAnswer:
    """The answer in a ModelInferResponse.

    Raises:
        TransportError: it does not fit the protocol.
    """
    try:
        tensors = {
            output.name: read_array(output.datatype, list(output.shape), raw)
            for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
        }
    except ValueError as error:
        raise TransportError("INTERNAL", f"the answer cannot be read: {error}") from None
    return InferAnswer(message.model_version, tensors)


def question(query: Query) -> tuple[str, Any]:
    """Method and message of a question."""
    method, message = _QUESTIONS[query.kind]
    named = {"name": query.model, "version": query.version} if query.kind not in ("live", "server", "index") else {}
    return method, getattr(service_pb2, message)(**named)


def read_reply(query: Query, message: Any) -> dict[str, Any]:
    """A reply as the JSON that HTTP gives; whole numbers of 64 bits stay text, as protobuf's JSON has them."""
    reply: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return dict(reply.get("config", {})) if query.kind == "config" else reply


def failure(error: grpc.RpcError) -> TransportError:
    """What a failed call says."""
    return TransportError(str(error.code().name), str(error.details() or ""))
