"""The one table from failures to HTTP answers, in OpenAI's form of an error and in that of TEI.

| what happened | HTTP | code |
|---|---|---|
| the request itself is wrong | 400 | invalid_value |
| no key, or a wrong one | 401 | invalid_api_key |
| no such model; no such path | 404 | model_not_found; not_found |
| the body took too long | 408 | body_timeout |
| the body is too large | 413 | body_too_large |
| the body is compressed, or said to be no JSON | 415 | unsupported_media_type |
| a key is over its rate | 429 | rate_limit_exceeded |
| a queue or a lane of the server is full, or the door itself | 429 | overloaded |
| (log and metrics only) the client went away | 499 | client_gone |
| the door failed | 500 | internal_error |
| the server failed, or refuses the door | 502 | server_failure |
| waited too long in the server's queue | 503 | queue_timeout |
| no server, or the model is not ready | 503 | server_unavailable |
| the deadline passed | 504 | deadline_exceeded |
"""

from __future__ import annotations

import math
from typing import Any, Literal

from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerUnavailable,
)

Dialect = Literal["openai", "tei"]
INVALID = "invalid_request_error"
SERVER = "server_error"


class Problem(Exception):  # noqa: N818 - an answer, not a fault of the code
    """A request that ends in an error answer.

    Args:
        status: HTTP status.
        code: of the table above.
        message: what happened, the limit, what to do; no text of the request.
        type_: OpenAI's class of the error.
        param: field of the body, or header, at fault.
        retry_after_s: when to come back, seconds.
        detail: for the log only: what the server said.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type_: str = INVALID,
        param: str | None = None,
        retry_after_s: float | None = None,
        detail: str | None = None,
    ) -> None:
        """Keeps the parts."""
        super().__init__(message)
        self.status, self.code, self.message, self.type_, self.param = status, code, message, type_, param
        self.retry_after_s, self.detail = retry_after_s, detail

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The JSON of the answer.

        OpenAI: https://platform.openai.com/docs/guides/error-codes, an object `error`. TEI: `ErrorResponse` of its
        router, a text `error` and an `error_type`.
        """
        if dialect == "tei":
            return {"error": self.message, "error_type": self._tei_type()}
        return {"error": {"message": self.message, "type": self.type_, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that the answer has beside the usual ones; `retry-after-ms` is what OpenAI's clients read first."""
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        if self.retry_after_s is None:
            return []
        return [
            (b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()),
            (b"retry-after-ms", str(max(1, math.ceil(self.retry_after_s * 1000))).encode()),
        ]

    def _tei_type(self) -> str:
        if self.status == 429:
            return "Overloaded"
        if self.status in (503, 504):
            return "Unhealthy"
        return "Backend" if self.status >= 500 else "Validation"


def invalid(message: str, param: str | None = None) -> Problem:
    """400: the request itself is wrong."""
    return Problem(400, "invalid_value", message, param=param)


def overloaded(message: str, retry_after_s: float, detail: str | None = None) -> Problem:
    """429: the server or the door has too much to do."""
    return Problem(429, "overloaded", message, type_=SERVER, retry_after_s=retry_after_s, detail=detail)


def from_encoder_error(error: EncoderError, retry_after_s: float) -> Problem:
    """The answer to a failure of the client behind the door.

    The client's own message names the server's address and is written for callers of the Python client, so that only
    an INVALID_ARGUMENT, which is about the request, is shown as it is; the others are told in the door's words and kept
    as `detail`.
    """
    detail = str(error)
    if isinstance(error, InvalidInput):
        if error.status not in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"):
            return _server(502, "server_failure", "the server does not let the door in; tell its operator", detail)
        return invalid(_shown(error))
    if isinstance(error, Overloaded):
        return overloaded("the server has too much to do; try again later", retry_after_s, detail)
    if isinstance(error, QueueTimeout):
        what = "the request waited too long in the server's queue and was not computed; try again later"
        return _server(503, "queue_timeout", what, detail, retry_after_s)
    if isinstance(error, DeadlineExceeded):
        return _server(504, "deadline_exceeded", "the deadline passed; send fewer texts, or allow more time", detail)
    if isinstance(error, ServerUnavailable):
        what = "the server cannot be reached, or the model is not ready; try again later"
        return _server(503, "server_unavailable", what, detail, retry_after_s)
    return _server(502, "server_failure", "the server failed; its log says more", detail)


def _server(status: int, code: str, message: str, detail: str, retry_after_s: float | None = None) -> Problem:
    return Problem(status, code, message, type_=SERVER, detail=detail, retry_after_s=retry_after_s)


def _shown(error: InvalidInput) -> str:
    """The client's message without the server's address, and without the value, which may be a text."""
    parts = [error.what]
    if error.texts and not error.what.startswith("text"):
        parts[0] = f"text {error.texts[0]}: {error.what}"
    if error.limit:
        parts.append(f"limit: {error.limit}")
    return "; ".join(parts)
