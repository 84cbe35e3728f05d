"""The entry's errors: a small closed set of kinds, each with the Triton code it becomes (README, "Errors")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["invalid", "overloaded", "timeout", "cancelled", "failed"]
#: Every kind, in the order above.
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no vectors.

    Attributes:
        kind: `invalid` (INVALID_ARGUMENT), `overloaded` and `timeout` (UNAVAILABLE), `cancelled` (CANCELLED),
            `failed` (INTERNAL).
        message: what happened, the value, the limit, what to do.
    """

    kind: Kind
    message: str


class LaneError(Exception):
    """A bucket model gave no answer. `overloaded` when it is not loaded, else `failed`."""

    def __init__(self, kind: Kind, message: str):
        """See the class."""
        super().__init__(message)
        self.kind: Kind = kind
