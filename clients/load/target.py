"""How the generator asks a server: one text a request, as little work of its own as possible."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from clients.connection import Headers, Tls, parse_address
from clients.errors import EncoderError, InvalidInput
from clients.failures import from_status
from clients.load.plan import PRIORITIES, Request
from clients.load.records import OK
from clients.options import seconds
from clients.transports.grpc_messages import open_channel

Protocols = Literal["triton", "openai"]
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_CONNECT_S = 5.0
#: Of the words of an error that are kept, characters.
_MOST_WORDS = 400
_LEVELS = {level: name for name, level in PRIORITIES.items()}


@dataclass(frozen=True)
class Target:
    """A server under load.

    Attributes:
        url: host:port of Triton's gRPC endpoint, or grpcs://host:port where it is encrypted (`triton`); or the whole
            address of an OpenAI-like endpoint such as http://127.0.0.1:7997/embeddings (`openai`).
        protocol: as above.
        model: name of the entry model, or the name the endpoint knows the model by.
        deadline_s: longest time for one request, seconds.
        question: first text of each request's pair, for models that read pairs alone (reranking, answering); the
            texts of the load are the second. Empty: single texts (`triton` only).
        headers: of every request, keys among them; names in lower case.
        tls: certificates of an encrypted connection.
    """

    url: str
    protocol: Protocols = "triton"
    model: str = "encode"
    deadline_s: float = 60.0
    question: str = ""
    headers: Headers = ()
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Checks that address and protocol fit.

        Raises:
            InvalidInput: they do not, or the deadline is out of its limits.
        """
        if self.url.startswith(("http://", "https://")) != (self.protocol == "openai"):
            raise InvalidInput(
                f"the address does not fit the protocol {self.protocol}",
                value=self.url,
                limit="host:port for triton, http://... for openai",
            )
        if self.protocol == "triton":
            parse_address(self.url, "grpc", self.tls)
        if self.tls is not None:
            self.tls.context()  # a wrong file is the caller's error
        seconds("deadline of a request", self.deadline_s)


class Sender(Protocol):
    """A connection of one process.

    Attributes:
        said: kind of error -> the words of the first of that kind.
    """

    said: dict[str, str]

    async def send(self, request: Request) -> tuple[int, str]:
        """Sends one request and waits for its end; never raises for what a server may do.

        Returns:
            Tokens as the server counted them (0: it said nothing), and "ok" or the kind of error.
        """
        ...


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Sender]:
    """A connection to a target, for the running event loop."""
    if target.protocol == "openai":
        async with _openai(target) as http:
            yield http
        return
    async with open_channel(grpc.aio, parse_address(target.url, "grpc", target.tls)) as channel:
        # A connection is made before the first request is due. One that cannot be made shows in every request.
        with suppress(TimeoutError):
            await asyncio.wait_for(_tried(channel), _CONNECT_S)
        yield _Triton(channel, target)


async def _tried(channel: grpc.aio.Channel) -> None:
    """Waits until the connection is made, or has failed; `channel_ready` would wait for the server."""
    state = channel.get_state(try_to_connect=True)
    while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


class _Triton:
    """KServe v2 over gRPC. The message is filled in by hand: no numpy, no client object per request."""

    def __init__(self, channel: grpc.aio.Channel, target: Target):
        self.said: dict[str, str] = {}
        self._target = target
        self._call: Any = channel.unary_unary(
            _METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    async def send(self, request: Request) -> tuple[int, str]:
        message = service_pb2.ModelInferRequest(model_name=self._target.model)
        texts = {"TEXT": self._target.question, "TEXT_PAIR": request.text} if self._target.question else {}
        for name, text in (texts or {"TEXT": request.text}).items():
            message.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            raw = text.encode()
            message.raw_input_contents.append(struct.pack("<I", len(raw)) + raw)
        if request.priority:
            message.parameters["priority"].uint64_param = request.priority
            # As our clients do: the long lane's order goes by it.
            message.parameters["class"].string_param = _LEVELS[request.priority]
        try:
            answer = await self._call(message, timeout=self._target.deadline_s, metadata=self._target.headers)
        except grpc.RpcError as error:
            failed: EncoderError = from_status(error.code().name, error.details() or "", self._target.url)
            return 0, _noted(self.said, type(failed).__name__, str(failed))
        for number, output in enumerate(answer.outputs):
            if output.name == "TOKENS" and number < len(answer.raw_output_contents):
                return int.from_bytes(answer.raw_output_contents[number][:4], "little"), OK
        return 0, OK


class _OpenAi:
    """POST {"model", "input", "encoding_format": "base64"}: what OpenAI's own client sends, the cheaper encoding."""

    def __init__(self, session: Any, target: Target):
        self.said: dict[str, str] = {}
        self._session, self._target = session, target
        self._server_name = target.tls.server_name if target.tls else None

    async def send(self, request: Request) -> tuple[int, str]:
        import aiohttp

        body = {"model": self._target.model, "input": [request.text], "encoding_format": "base64"}
        # What this project's door takes; to others it is one header more.
        headers = {"X-Priority": _LEVELS[request.priority]} if request.priority else None
        try:
            async with self._session.post(
                self._target.url, json=body, headers=headers, server_hostname=self._server_name
            ) as response:
                content = await response.read()
                if response.status == 200 and content:
                    return 0, OK
                words = content[:_MOST_WORDS].decode(errors="replace") or "an empty answer"
                return 0, _noted(self.said, f"HTTP {response.status}", words)
        except TimeoutError:
            return 0, _noted(self.said, "DeadlineExceeded", f"no answer within {self._target.deadline_s:g} s")
        except aiohttp.ClientError as error:
            return 0, _noted(self.said, type(error).__name__, str(error) or repr(error))


def _noted(said: dict[str, str], kind: str, words: str) -> str:
    """The kind of an error, whose words are kept if it is the first of its kind."""
    said.setdefault(kind, " ".join(words.split())[:_MOST_WORDS])
    return kind


@asynccontextmanager
async def _openai(target: Target) -> AsyncIterator[_OpenAi]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=target.deadline_s)
    connector = aiohttp.TCPConnector(limit=0, ssl=target.tls.context() if target.tls else True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=dict(target.headers)) as session:
        yield _OpenAi(session, target)
