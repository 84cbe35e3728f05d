"""From the tokens of one request to the outputs of `tokenize_<bucket>`, or the reason it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
from lanes_entry.config import EntryConfig
from lanes_entry.errors import Refusal
from lanes_entry.group import Group, Row
from lanes_entry.request import Question
from lanes_entry.ticket import Ticket
from lanes_entry.tokenise import Tokens
from numpy.typing import NDArray


def check_question(question: Question | Refusal) -> Question | Refusal:
    """Refuse what needs more than one row for a text: an ensemble's steps have as many rows as the request."""
    if isinstance(question, Question) and question.options.truncate == "chunk":
        return Refusal(
            "invalid",
            "parameter truncate is 'chunk'; limit: 'end', 'start' or 'error', since an ensemble has one row for a "
            "text; send it to the entry",
        )
    return question


def step_tensors(tokens: list[Tokens], config: EntryConfig) -> dict[str, NDArray[np.int32]]:
    """What one request hands to the bucket model, and what it tells its client.

    Args:
        tokens: its texts, one piece each.
        config: names the one bucket.

    Returns:
        input_ids INT32 [n, L], length INT32 [n, 1], segment_start INT32 [n, 1] where the lane takes it, TOKENS and CUT
        INT32 [n, 1].
    """
    (route,) = config.buckets
    ticket = Ticket(tokens)
    rows = tuple(Row(ticket, index) for index in range(len(ticket.pieces)))
    tensors: dict[str, NDArray[np.int32]] = Group(route, rows).tensors(config.pad_id, segment=config.segment)
    return tensors | {
        "TOKENS": np.array([[text.used] for text in tokens], dtype=np.int32).reshape(-1, 1),
        "CUT": np.array([[text.cut] for text in tokens], dtype=np.int32).reshape(-1, 1),
    }


def probe_tensors(length: int, *, segment: bool) -> dict[str, NDArray[Any]]:
    """The smallest row that a bucket model of `length` tokens takes: one token, and no second text."""
    ids = np.zeros((1, length), dtype=np.int32)
    one = np.ones((1, 1), dtype=np.int32)
    return {"input_ids": ids, "length": one} | ({"segment_start": one} if segment else {})
