"""The one table from what a server or a connection says to the six error kinds.

HTTP codes are first turned into the gRPC statuses that Triton makes them from. The texts in the table were read off
tritonserver 2.51. Triton puts `[request id: ...] ` before some of them, so patterns are searched, not matched from the
start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerFailure,
    ServerUnavailable,
)


class TransportError(Exception):
    """What a transport hands over when a request failed: a gRPC status name and the message that came with it."""

    def __init__(self, status: str, message: str) -> None:
        """Keeps both; the message may be empty."""
        super().__init__(status, message)
        self.status, self.message = status, message


#: What Triton 2.51 and the proxies in front of it answer over HTTP, as the gRPC status that means the same.
HTTP_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def from_http_code(code: int, message: str) -> TransportError:
    """The failure behind an HTTP answer whose code is not 200; a code that no row names is INTERNAL."""
    if code == 413:
        message = f"message too large: {message}"
    return TransportError(HTTP_STATUSES.get(code, "INTERNAL"), message or f"HTTP {code}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """One row: an error whose status is `status` and whose message holds `pattern` is a `kind`."""

    status: str
    pattern: str
    kind: type[EncoderError]
    what: str
    """What happened; empty when the server's message says it better and is shown alone."""
    remedy: str | None
    refused: bool = False
    """The request was surely not computed, and a later try can succeed: see EncoderError.refused."""


_RETRY = "try again after a pause, or send less at a time"
_KEY = "give EncoderClient token=, restricted_key= or headers= with the key"
_LOAD = "wait until the model is loaded, or correct the model's name"

# The first row that fits decides. Statuses that no row names are a ServerFailure.
_KINDS: tuple[_Kind, ...] = (
    _Kind("INVALID_ARGUMENT", r"batch-size must be <=", InvalidInput, "", "give EncoderClient a smaller batch="),
    _Kind(
        "INVALID_ARGUMENT",
        r"expected [0-9]+ inputs but got|unexpected inference input|missing required input",
        InvalidInput,
        "the model takes other inputs than the call sends",
        "name an entry model whose task is the call's: single texts or pairs",
    ),
    _Kind("INVALID_ARGUMENT", r"", InvalidInput, "", None),
    _Kind(
        "UNAVAILABLE",
        r"Request timeout expired",
        QueueTimeout,
        "the request waited in the server's queue longer than its timeout",
        "try again after a pause; a longer timeout= helps up to the server's own for the priority",
        refused=True,
    ),
    _Kind("UNAVAILABLE", r"Exceeds maximum queue size", Overloaded, "the queue of the priority is full", _RETRY, True),
    _Kind("UNAVAILABLE", r"(?i)long lane", Overloaded, "", _RETRY, True),
    _Kind("UNAVAILABLE", r"is restricted, expecting header", InvalidInput, "the server asks for a key", _KEY),
    _Kind(
        "UNAVAILABLE",
        r"(?i)certificate|handshake|wrong version number|\bSSL|\bTLS",
        ServerUnavailable,
        "the server's TLS and the client's do not fit",
        "give tls= with the root certificate of the server, and a client certificate if it asks for one",
    ),
    _Kind(
        "UNAVAILABLE",
        r"(?i)failed to connect|resolving|resolution failed|name resolution",
        ServerUnavailable,
        "the server cannot be reached",
        "start the server, or correct the url (8001 is Triton's own port for gRPC, 8000 for HTTP)",
        refused=True,
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
    _Kind("RESOURCE_EXHAUSTED", r"", Overloaded, "the server has no capacity left", _RETRY, True),
    _Kind("UNAUTHENTICATED", r"", InvalidInput, "the server asks for a key", _KEY),
    _Kind("PERMISSION_DENIED", r"", InvalidInput, "the server refuses the call's key", _KEY),
    _Kind(
        "UNIMPLEMENTED",
        r"",
        ServerFailure,
        "what answers is not a Triton server",
        "correct the url (8001 is Triton's own port for gRPC, 8000 for HTTP)",
    ),
)
_OTHER = _Kind("", r"", ServerFailure, "the server failed", "read the server's log")

_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
_POSITION = re.compile(r"text ([0-9]{1,9}) ")


def from_status(status: str, message: str, url: str, texts: range | None = None) -> EncoderError:
    """Makes the typed error of a failed request.

    Args:
        status: name of the gRPC status.
        message: what the server or the connection said; may be empty.
        url: the server that was called, as the client was given it; shown in the message.
        texts: positions of the texts the failed request carried.

    Returns:
        An error of the first kind in the table whose status and pattern fit; ServerFailure when none does.
        Its `status` is the status as received. The text that the server refuses by its position in the request is
        named by its position in the call, alone.
    """
    kind = next((row for row in _KINDS if row.status == status and re.search(row.pattern, message)), _OTHER)
    message = _REQUEST_ID.sub("", message) or "no message"
    if status == "INVALID_ARGUMENT" and texts is not None:
        message, texts = _in_call(message, texts)
    error = kind.kind(
        kind.what or message,
        value=message if kind.what else None,
        remedy=None if "to do:" in message else kind.remedy,  # this project's entry gives its own
        status=status,
        url=url,
        texts=texts,
    )
    error.refused = kind.refused
    return error


def _in_call(message: str, texts: range) -> tuple[str, range]:
    """Counts a message's leading `text N ` within the call instead of the request; leaves any other message alone."""
    found = _POSITION.match(message)
    if found is None or int(found[1]) >= len(texts):
        return message, texts
    position = texts[int(found[1])]
    return f"text {position} {message[found.end() :]}", range(position, position + 1)
