"""A request, what is shared by all of them, and what becomes known of it on its way."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

import numpy as np
from starlette.datastructures import Headers

from clients.door.bodies import Truncation
from clients.door.catalog import Catalog, Model
from clients.door.keys import ANYBODY, Key, KeyRing
from clients.door.limits import RateLimits
from clients.door.metrics import DoorMetrics
from clients.door.problems import SERVER, Dialect, Problem, invalid, overloaded
from clients.door.settings import DoorSettings
from clients.door.token_ids import TokenIds
from clients.options import CallOptions
from clients.result import Floats, Ints

_REQUEST_ID = re.compile(r"^[A-Za-z0-9_.:-]{1,128}$")
# https://www.w3.org/TR/trace-context/
_TRACE_PARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
_TRACE_STATE = re.compile(r"^[ -~]{1,512}$")
_PRIORITIES = ("interactive", "background")


@dataclass(slots=True)
class Door:
    """What the requests share."""

    settings: DoorSettings
    metrics: DoorMetrics
    catalog: Catalog
    limits: RateLimits
    keys: KeyRing | None
    ids: TokenIds | None
    in_flight: int = 0
    bytes_held: int = 0
    """Of all bodies of the requests in flight."""


@dataclass(slots=True)
class Call:
    """A request, and what becomes known of it."""

    door: Door
    route: str
    headers: Headers
    dialect: Dialect = "openai"
    id: str = ""
    began: float = field(default_factory=time.monotonic)
    key: Key = ANYBODY
    priority: str = ""
    model: str = ""
    bytes_in: int = 0
    texts: int = 0
    tokens: int = 0
    cut: int = 0
    path: dict[str, str] = field(default_factory=dict)
    """What stands in the path for its parameters."""

    def __post_init__(self) -> None:
        """Takes the request's id, or gives it one."""
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        self.priority = self.door.settings.priority

    def read_priority(self) -> None:
        """Reads X-Priority.

        Raises:
            Problem: 400.
        """
        given = self.headers.get("x-priority", self.priority).strip().lower()
        if given not in _PRIORITIES:
            raise invalid(f"X-Priority is unknown; limit: {' or '.join(_PRIORITIES)}", "x-priority")
        self.priority = given

    def options(self, truncate: Truncation | None) -> CallOptions:
        """The options of the calls to the server.

        Raises:
            Problem: 400, a header is wrong; 504, no time is left.
        """
        settings = self.door.settings
        deadline = self._milliseconds("x-deadline-ms", settings.deadline_s) or settings.deadline_s
        remaining = deadline - (time.monotonic() - self.began)
        if remaining <= 0:
            raise Problem(504, "deadline_exceeded", "the deadline passed before anything was sent", type_=SERVER)
        return {
            "priority": self.priority,  # type: ignore[typeddict-item]  # one of the two, checked
            "deadline": remaining,
            "timeout": self._milliseconds("x-queue-timeout-ms", settings.queue_timeout_s),
            "truncate": truncate or settings.truncate,
            "headers": self._trace(),
        }

    async def find(self, name: str | None, *tasks: str) -> Model:
        """The model of the request; see Catalog.find. Without tasks it may be for any."""
        model = await self.door.catalog.find(name, tasks)
        self.model = model.name
        return model

    def hold(self, size: int) -> None:
        """Counts bytes of the body, which are held until the request ends.

        Raises:
            Problem: 429, all requests together hold too many.
        """
        settings = self.door.settings
        if self.door.bytes_held + size > settings.max_bodies_bytes:
            raise overloaded("the door holds too many large requests; try again later", settings.retry_after_s)
        self.door.bytes_held += size
        self.bytes_in += size

    def take(self, texts: int) -> None:
        """Takes the request's texts from its key's rate, before they are sent.

        Raises:
            Problem: 429.
        """
        self.door.limits.texts(self.key, texts, time.monotonic())
        self.texts = texts

    def spent(self, tokens: Ints, cut: Ints) -> dict[str, int]:
        """Counts the tokens of an answer.

        Returns:
            OpenAI's `usage`: tokens the model read, special tokens included.
        """
        self.tokens, self.cut = int(tokens.sum()), int(cut.sum())
        self.door.limits.spend(self.key, self.tokens, time.monotonic())
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    @property
    def trace_id(self) -> str | None:
        """Of the header traceparent."""
        parent = self._trace().get("traceparent")
        return None if parent is None else parent[3:35]

    def _trace(self) -> dict[str, str]:
        """The trace headers that are as they should be; wrong ones are not passed on."""
        parent, state = self.headers.get("traceparent", ""), self.headers.get("tracestate", "")
        if not _TRACE_PARENT.match(parent):
            return {}
        return {"traceparent": parent, **({"tracestate": state} if _TRACE_STATE.match(state) else {})}

    def _milliseconds(self, name: str, most_s: float | None) -> float | None:
        """A header's time in seconds, at most the setting's."""
        given = self.headers.get(name)
        if given is None:
            return most_s
        if not (given.isascii() and given.isdigit()) or not 1 <= int(given[:10]) <= 86_400_000 or len(given) > 10:
            raise invalid(f"{name} is wrong; limit: a whole number of milliseconds, 1 to 86400000", name)
        return int(given) / 1000 if most_s is None else min(int(given) / 1000, most_s)


def check_finite(values: Floats) -> None:
    """Refuses values that are no numbers: JSON has none for them, and no caller expects them.

    Raises:
        Problem: 502.
    """
    if not np.isfinite(values).all():
        raise Problem(502, "server_failure", "the model gave values that are not numbers", type_=SERVER)
