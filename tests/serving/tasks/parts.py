"""Finished tickets with rows that a test gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.serving.entry.request import Options, Question
from builders.serving.entry.ticket import Ticket
from builders.serving.entry.tokenise import Piece, Spans, Tokens


def window(start: int, own: int, lead: int = 1) -> Piece:
    """A window with `own` tokens from `start` on, a special token behind it and `lead` of them before it."""
    return Piece(np.zeros(lead + own + 1, dtype=np.int32), lead + own + 1, lead, start, own)


def text(*windows: Piece, cut: int = 0, spans: Spans | None = None) -> Tokens:
    return Tokens(windows, cut, spans)


def answered(
    texts: Sequence[Tokens], rows: Sequence[NDArray[np.float32]], question: Question | None = None, **options: Any
) -> Ticket:
    """A ticket whose lanes have answered."""
    ticket = Ticket(texts, question or Question(("",) * len(texts), None, Options(**options)))
    ticket.rows = [np.asarray(row, dtype=np.float32) for row in rows]
    ticket.settle(len(ticket.pieces))
    return ticket
