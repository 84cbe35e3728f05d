"""The entry's errors: a small closed set of kinds, each with the Triton code it becomes (README, "Errors")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["invalid", "overloaded", "cancelled", "failed"]


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no vectors.

    Attributes:
        kind: `invalid` (INVALID_ARGUMENT), `overloaded` (UNAVAILABLE), `cancelled` (CANCELLED), `failed` (INTERNAL).
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
