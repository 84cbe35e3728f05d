"""What a call can fail with: six kinds. The table from statuses to them is in `failures`."""

# ruff: noqa: N818  (the kinds are named for what happened)

from __future__ import annotations

from typing import ClassVar


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
        status: name of the gRPC status, a str; an HTTP code is given as the status it stands for (503: UNAVAILABLE).
        safe_to_retry: True of a kind that a later try of the same call may not meet again: the queue was full or too
            slow, the server was not there. Back off before: the usual reason is that it has too much to do. Among them
            is a connection that was lost on the way, whose request may have been computed; see `refused`.
        texts: as above. Other texts of the call may have been computed; the call returns none of them.
        refused: True when this very request was surely not computed: the queue timed out, a queue was full, or no
            connection came about. Only then does the client itself try again (see `RetryPolicy`).
        retries: how often the call tried requests again before it gave up.

    Example:
        >>> from clients import EncoderClient, EncoderError
        >>> try:
        ...     with EncoderClient("127.0.0.1:1") as client:  # where nothing listens
        ...         client.encode(["a text"], priority="interactive")
        ... except EncoderError as error:
        ...     print(error.status, error.safe_to_retry, error)
        UNAVAILABLE True text 0: the server cannot be reached: '...'; server: 127.0.0.1:1; to do: ...
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
        self.refused, self.retries = False, 0
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


def _shown(value: object) -> str:
    """repr, cut in the middle when it is long: a value may be a whole text."""
    shown = repr(value)
    return shown if len(shown) <= 400 else f"{shown[:200]} ... {shown[-190:]}"


def _named(texts: range) -> str:
    """`text 3` or `texts 32 to 63`, counted from 0."""
    return f"text {texts[0]}" if len(texts) == 1 else f"texts {texts[0]} to {texts[-1]}"
