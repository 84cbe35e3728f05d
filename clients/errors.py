"""What a call can fail with: six kinds, and the one table from gRPC statuses to them.

The texts in the table were read off tritonserver 2.51. Triton puts `[request id: ...] ` before some of them,
so patterns are searched, not matched from the start.
"""

# ruff: noqa: N818  (the kinds are named for what happened)

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import grpc
from tritonclient.utils import InferenceServerException


class EncoderError(Exception):
    """Base of every error a call raises: what happened, the value, the limit, what to do.

    Args:
        what: what is wrong, one clause.
        value: the offending value, shown as given, shortened (None when there is none).
        limit: the bound or the form that was expected.
        remedy: what to do about it, an imperative clause.
        status: name of the gRPC status, for example "UNAVAILABLE"; left out, the kind's own.
        url: the server that was called, host:port (None for an error found before anything was sent).
        texts: positions, in the call's list, of the texts the error is about (None when it concerns no text); the
            message names them first, unless `what` begins with their name.

    Attributes:
        status: name of the gRPC status, a str.
        safe_to_retry: True when the server refused the request before computing anything and a later try can succeed.
            Back off before trying again: the usual reason is that the server has too much to do.
        texts: as above. Other texts of the call may have been computed; the call returns none of them.

    Example:
        >>> from clients import EncoderClient, EncoderError
        >>> try:
        ...     with EncoderClient("127.0.0.1:8001") as client:
        ...         client.encode(["a text"], priority="interactive")
        ... except EncoderError as error:
        ...     print(error.status, error.safe_to_retry, error)
        UNAVAILABLE True the server cannot be reached: '...'; server: 127.0.0.1:8001; to do: ...
    """

    status: str = "UNKNOWN"
    safe_to_retry: ClassVar[bool] = False

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        limit: str | None = None,
        remedy: str | None = None,
        status: str | None = None,
        url: str | None = None,
        texts: range | None = None,
    ):
        """Puts the parts together, one line; see the class."""
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        self.status = status or type(self).status
        self.url, self.texts = url, texts
        parts = [what if value is None else f"{what}: {_shown(value)}"]
        if texts and not what.startswith(f"{_named(texts)} "):
            parts[0] = f"{_named(texts)}: {parts[0]}"
        if limit:
            parts.append(f"limit: {limit}")
        if url:
            parts.append(f"server: {url}")
        if remedy:
            parts.append(f"to do: {remedy}")
        super().__init__("; ".join(parts))


class InvalidInput(EncoderError):
    """The call itself is wrong (a text, an option, its size); the same call fails again."""

    status = "INVALID_ARGUMENT"


class QueueTimeout(EncoderError):
    """The request waited in the server's queue longer than it may, and was dropped without being computed."""

    status = "UNAVAILABLE"
    safe_to_retry = True


class Overloaded(EncoderError):
    """A queue or a lane of the server is full; the request was refused at once."""

    status = "UNAVAILABLE"
    safe_to_retry = True


class DeadlineExceeded(EncoderError):
    """The call's own `deadline` passed. The server may have computed the answer, so trying again adds to its work."""

    status = "DEADLINE_EXCEEDED"


class ServerUnavailable(EncoderError):
    """The server cannot be reached, or the model is not loaded, or the call was cancelled on the way."""

    status = "UNAVAILABLE"
    safe_to_retry = True


class ServerFailure(EncoderError):
    """The server failed, or answered what this client does not understand; its log says more."""

    status = "INTERNAL"


@dataclass(frozen=True, slots=True)
class _Kind:
    """One row: an error whose status is `status` and whose message holds `pattern` is a `kind`."""

    status: str
    pattern: str
    kind: type[EncoderError]
    what: str
    """What happened; empty when the server's message says it better and is shown alone."""
    remedy: str | None


_RETRY = "try again after a pause, or send less at a time"
_LOAD = "wait until the model is loaded, or correct the model's name"

# The first row that fits decides. Statuses that no row names are a ServerFailure.
_KINDS: tuple[_Kind, ...] = (
    _Kind("INVALID_ARGUMENT", r"batch-size must be <=", InvalidInput, "", "give EncoderClient a smaller batch="),
    _Kind("INVALID_ARGUMENT", r"", InvalidInput, "", None),
    _Kind(
        "UNAVAILABLE",
        r"Request timeout expired",
        QueueTimeout,
        "the request waited in the server's queue longer than its timeout",
        "try again after a pause; a longer timeout= helps up to the server's own for the priority",
    ),
    _Kind("UNAVAILABLE", r"Exceeds maximum queue size", Overloaded, "the queue of the priority is full", _RETRY),
    _Kind("UNAVAILABLE", r"(?i)long lane", Overloaded, "", _RETRY),
    _Kind(
        "UNAVAILABLE",
        r"(?i)failed to connect|resolving|name resolution",
        ServerUnavailable,
        "the server cannot be reached",
        "start the server, or give the host:port of Triton's gRPC endpoint (8001 by default; 8000 is HTTP)",
    ),
    _Kind("UNAVAILABLE", r"not at ready state", ServerUnavailable, "the model is not ready", _LOAD),
    _Kind("UNAVAILABLE", r"", ServerUnavailable, "the server is unavailable", "try again after a pause"),
    _Kind("NOT_FOUND", r"", ServerUnavailable, "the model is not loaded", _LOAD),
    _Kind(
        "CANCELLED",
        r"",
        ServerUnavailable,
        "the call was cancelled",
        "try again; keep the client open until its calls return",
    ),
    _Kind(
        "DEADLINE_EXCEEDED",
        r"",
        DeadlineExceeded,
        "the call did not end within its deadline",
        "give a longer deadline=, fewer texts, or priority='interactive'",
    ),
    # gRPC's own limits on a message and on the headers, which carry an error's text: another try meets them again.
    _Kind(
        "RESOURCE_EXHAUSTED",
        r"(?i)metadata size|message (size|larger|exceeds|too large)",
        InvalidInput,
        "a message of the call is too large",
        "give EncoderClient a smaller batch=, or shorten the texts",
    ),
    _Kind("RESOURCE_EXHAUSTED", r"", Overloaded, "the server has no capacity left", _RETRY),
    _Kind(
        "UNIMPLEMENTED",
        r"",
        ServerFailure,
        "what answers is not a Triton server",
        "give the host:port of Triton's gRPC endpoint (8001 by default)",
    ),
)
_OTHER = _Kind("", r"", ServerFailure, "the server failed", "read the server's log")

_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
_POSITION = re.compile(r"text ([0-9]{1,9}) ")


def from_grpc(error: grpc.RpcError | InferenceServerException, url: str, texts: range | None = None) -> EncoderError:
    """Makes the typed error of a gRPC failure.

    Args:
        error: what tritonclient raises or hands to a callback, or a bare grpc.RpcError.
        url: the server that was called, host:port; shown in the message.
        texts: positions of the texts the failed request carried.

    Returns:
        An error of the first kind in the table whose status and pattern fit; ServerFailure when none does.
        Its `status` is the gRPC status as received. The text that the server refuses by its position in the request is
        named by its position in the call, alone.
    """
    status, message = _status_and_message(error)
    kind = next((row for row in _KINDS if row.status == status and re.search(row.pattern, message)), _OTHER)
    message = _REQUEST_ID.sub("", message) or "no message"
    if status == "INVALID_ARGUMENT" and texts is not None:
        message, texts = _in_call(message, texts)
    return kind.kind(
        kind.what or message,
        value=message if kind.what else None,
        remedy=None if "to do:" in message else kind.remedy,  # this project's entry gives its own
        status=status,
        url=url,
        texts=texts,
    )


def _in_call(message: str, texts: range) -> tuple[str, range]:
    """Counts a message's leading `text N ` within the call instead of the request; leaves any other message alone."""
    found = _POSITION.match(message)
    if found is None or int(found[1]) >= len(texts):
        return message, texts
    position = texts[int(found[1])]
    return f"text {position} {message[found.end() :]}", range(position, position + 1)


def _status_and_message(error: grpc.RpcError | InferenceServerException) -> tuple[str, str]:
    """Status name and text; tritonclient writes the status as "StatusCode.NAME"."""
    if isinstance(error, InferenceServerException):
        return str(error.status() or "UNKNOWN").removeprefix("StatusCode."), str(error.message() or "")
    return str(error.code().name), str(error.details() or "")


def _shown(value: object) -> str:
    """repr, cut in the middle when it is long: a value may be a whole text."""
    shown = repr(value)
    return shown if len(shown) <= 400 else f"{shown[:200]} ... {shown[-190:]}"


def _named(texts: range) -> str:
    """`text 3` or `texts 32 to 63`, counted from 0."""
    return f"text {texts[0]}" if len(texts) == 1 else f"texts {texts[0]} to {texts[-1]}"
