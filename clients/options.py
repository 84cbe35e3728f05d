"""What a call may ask, checked before anything is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from clients.connection import Headers, check_headers
from clients.errors import InvalidInput
from clients.tracing import trace_headers

Priority = Literal["interactive", "background"] | int
Truncate = Literal["end", "start", "error", "chunk"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Progress = bool | Callable[[int, int], None]

_LEVELS = {"interactive": 1, "background": 2}
_CLASSES = {level: name for name, level in _LEVELS.items()}
_TRUNCATE = ("end", "start", "error", "chunk")
_AGGREGATION = ("none", "simple", "first", "average", "max")
_LONGEST_WAIT_S = 86_400.0
_MOST_TOKENS = 65_536


class CallOptions(TypedDict, total=False):
    """Options that every call of texts takes, all by keyword and all optional."""

    priority: Priority | None
    """"interactive" (1) is served before "background" (2); None is background. The request also carries it as the
    parameter `class`."""
    timeout: float | None
    """Longest wait in the server's queue, seconds, at least 1e-6; it can only shorten the server's own limit for the
    priority. It holds for each request of the call, and ends when computing starts."""
    deadline: float | None
    """Longest time for the whole call, seconds: waiting, computing, transfer and retries together; None waits without
    end. Over HTTP the server does not notice when it passes, and computes what was sent: give `timeout` too."""
    truncate: Truncate
    """A text that is too long: "end" (default) cuts its end off (`cut` says how much), "start" its beginning, "error"
    refuses it, "chunk" reads it whole in windows and merges their answers. Of a pair only the second text is cut."""
    overlap: int | None
    """Tokens that two neighbouring windows share, with truncate="chunk"; None is the model's own."""
    headers: Mapping[str, str] | None
    """Headers of this call beside the client's. Without `traceparent` among them the span of OpenTelemetry that is
    current is sent, where the package is installed."""
    progress: Progress
    """True draws a bar on stderr if that is a terminal; a function is called with (done, all) texts after each
    request, in the order they end."""


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one call, as Triton takes them."""

    parameters: dict[str, str | int]
    """Of each request; `priority` and `timeout` (microseconds) among them when they are given."""
    ends: float | None
    """Value of time.monotonic() at which the call is over."""
    headers: Headers
    progress: Progress

    def remaining(self) -> float | None:
        """Seconds left to the call; None without a deadline."""
        return None if self.ends is None else self.ends - time.monotonic()


def check_options(
    *,
    priority: Priority | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    truncate: object = "end",
    overlap: int | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress = False,
    task: Mapping[str, str | int | None] | None = None,
) -> Options:
    """Checks a call's options (CallOptions) and turns them into Triton's units.

    Args:
        priority: and the others: see CallOptions.
        timeout: as there.
        deadline: as there.
        truncate: as there.
        overlap: as there.
        headers: as there.
        progress: as there.
        task: the task's own request parameters, checked already; those that are None are not sent.

    Raises:
        InvalidInput: an option is outside its limits.
    """
    parameters: dict[str, str | int] = {"truncate": one_of("truncate", truncate, _TRUNCATE)}
    level = _level(priority)
    if level:
        parameters |= {"priority": level, "class": _CLASSES[level]}
    if timeout is not None:
        parameters["timeout"] = max(1, round(seconds("timeout", timeout) * 1e6))
    if overlap is not None:
        if truncate != "chunk":
            raise InvalidInput("overlap is given without chunks", value=overlap, limit="truncate='chunk' alone has it")
        parameters["overlap"] = whole("overlap", overlap, _MOST_TOKENS, least=0)
    parameters |= {name: value for name, value in (task or {}).items() if value is not None}
    if not isinstance(progress, bool) and not callable(progress):
        raise InvalidInput("progress is wrong", value=progress, limit="true, false, or a function of (done, all)")
    sent = check_headers(headers)
    if all(name != "traceparent" for name, _ in sent):
        sent += trace_headers()
    return Options(
        parameters=parameters,
        ends=None if deadline is None else time.monotonic() + seconds("deadline", deadline),
        headers=sent,
        progress=progress,
    )


def check_prompt(prompt: object) -> str | None:
    """The name of a prompt of the model; "" is none."""
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidInput("prompt is not a name", value=prompt, limit="a str, '' for no prompt, None for the default")
    return prompt


def check_dimensions(dimensions: object) -> int | None:
    """A shorter size of the embeddings; which ones there are the server knows."""
    return None if dimensions is None else whole("dimensions", dimensions, _MOST_TOKENS)


def check_aggregation(aggregation: object) -> str | None:
    """How tokens become entities."""
    return None if aggregation is None else one_of("aggregation", aggregation, _AGGREGATION)


def _level(priority: object) -> int:
    """Triton's number of a priority, 0 for none. Triton itself would serve an unknown one as background, silently."""
    if priority is None:
        return 0
    if isinstance(priority, str) and priority in _LEVELS:
        return _LEVELS[priority]
    if isinstance(priority, int | np.integer) and not isinstance(priority, bool) and int(priority) in _CLASSES:
        return int(priority)
    raise InvalidInput("unknown priority", value=priority, limit="'interactive' or 1, 'background' or 2, or None")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """One of the allowed words."""
    if isinstance(value, str) and value in allowed:
        return value
    raise InvalidInput(f"unknown {name}", value=value, limit=" or ".join(repr(word) for word in allowed))


def seconds(name: str, value: object) -> float:
    """A duration in seconds; bounded, so that milliseconds given by mistake do not pass for days."""
    limit = f"more than 0, at most {_LONGEST_WAIT_S:.0f} seconds"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidInput(f"{name} is not a number", value=value, limit=limit)
    if not 0 < value <= _LONGEST_WAIT_S:  # also refuses NaN
        raise InvalidInput(f"{name} is out of its limits", value=value, limit=limit)
    return float(value)


def whole(name: str, value: object, most: int, least: int = 1) -> int:
    """A whole number from `least` to `most`; numpy's are taken too."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise InvalidInput(f"{name} is out of its limits", value=value, limit=f"a whole number from {least} to {most}")
    return int(value)
