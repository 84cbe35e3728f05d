"""What a call may ask: its options and its texts, checked before anything is sent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clients.errors import InvalidInput

Priority = Literal["interactive", "background"] | int
Truncate = Literal["end", "error"]

_LEVELS = {"interactive": 1, "background": 2}
_LONGEST_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one call, as Triton takes them."""

    priority: int
    """0: none is sent."""
    timeout_us: int | None
    ends: float | None
    """Value of time.monotonic() at which the call is over."""
    truncate: str

    def remaining(self) -> float | None:
        """Seconds left to the call; None without a deadline."""
        return None if self.ends is None else self.ends - time.monotonic()


def check_options(priority: Priority | None, timeout: float | None, deadline: float | None, truncate: str) -> Options:
    """Checks a call's options and turns them into Triton's units."""
    if truncate not in ("end", "error"):
        raise InvalidInput("unknown truncate", value=truncate, limit="'end' or 'error'")
    return Options(
        priority=_level(priority),
        timeout_us=None if timeout is None else max(1, round(seconds("timeout", timeout) * 1e6)),
        ends=None if deadline is None else time.monotonic() + seconds("deadline", deadline),
        truncate=truncate,
    )


def _level(priority: object) -> int:
    """Triton's number of a priority. Triton itself would serve an unknown number as background, in silence."""
    if priority is None:
        return 0
    if isinstance(priority, str) and priority in _LEVELS:
        return _LEVELS[priority]
    if isinstance(priority, int) and not isinstance(priority, bool) and priority in _LEVELS.values():
        return priority
    raise InvalidInput("unknown priority", value=priority, limit="'interactive' or 1, 'background' or 2, or None")


def seconds(name: str, value: object) -> float:
    """A duration in seconds; bounded, so that milliseconds given by mistake do not pass for days."""
    limit = f"more than 0, at most {_LONGEST_WAIT_S:.0f} seconds"
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidInput(f"{name} is not a number", value=value, limit=limit)
    if not 0 < value <= _LONGEST_WAIT_S:  # also refuses NaN
        raise InvalidInput(f"{name} is out of its limits", value=value, limit=limit)
    return float(value)


def whole(name: str, value: object, most: int) -> int:
    """A whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(f"{name} is out of its limits", value=value, limit=f"a whole number from 1 to {most}")
    return value


def utf8(texts: object) -> list[bytes]:
    """The texts as UTF-8; names the first that is not one."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, bytes | bytearray) or not isinstance(texts, Iterable):
        raise InvalidInput(f"texts is of type {type(texts).__name__}", limit="a str or a sequence of str")
    encoded = []
    for index, text in enumerate(texts):
        here = range(index, index + 1)
        if not isinstance(text, str):
            raise InvalidInput(f"not a str but {type(text).__name__}", value=text, texts=here)
        try:
            encoded.append(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"cannot be UTF-8: lone surrogate at character {error.start}",
                value=text[error.start],
                remedy="decode the text's bytes with errors='replace', or remove the character",
                texts=here,
            ) from None
    return encoded
