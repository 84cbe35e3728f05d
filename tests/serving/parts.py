"""Small tokens, tickets, buckets and lanes whose vectors say which text they were made of."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.serving.entry.config import BucketRoute, EntryConfig, Level
from builders.serving.entry.group import LaneInputs
from builders.serving.entry.request import Options, Question
from builders.serving.entry.ticket import Ticket
from builders.serving.entry.tokenise import Piece, Tokens

DIM = 3
#: No text holds this token, so padding cannot be mistaken for text.
PAD = 7
_marks = itertools.count(1000)
#: Long enough for a busy machine; only a test that fails waits so long.
PATIENCE_S = 10.0


def tokens(length: int, mark: int | None = None) -> Tokens:
    """A text of `length` tokens, each the text's own mark."""
    ids = np.full(length, next(_marks) if mark is None else mark, dtype=np.int32)
    return Tokens((Piece(ids, length, own=length),), 0)


def ticket(*lengths: int, cancelled: Callable[[], bool] = lambda: False, level: Level = "background") -> Ticket:
    question = Question(("",) * len(lengths), options=Options(level=level))
    return Ticket([tokens(length) for length in lengths], question, cancelled)


def vectors(of: Ticket) -> NDArray[np.float32]:
    """What the lanes answered, FP32 [pieces, DIM]."""
    return np.stack(of.rows) if of.rows else np.empty((0, DIM), dtype=np.float32)


def expected(of: Ticket, buckets: Iterable[BucketRoute]) -> NDArray[np.float32]:
    """What `lane` answers for the texts of a ticket: mark, length, length of the smallest bucket."""
    rows = [
        (text.ids[0], text.ids.size, min(b.length for b in buckets if b.length >= text.ids.size)) for text in of.tokens
    ]
    return np.array(rows, dtype=np.float32).reshape(-1, DIM)


def lane(route: BucketRoute, inputs: LaneInputs) -> NDArray[np.float32]:
    """A lane that checks its contract: INT32, exactly the bucket's length, padded behind each text."""
    assert list(inputs) == ["input_ids", "length"]
    ids, length = inputs["input_ids"], inputs["length"]
    assert ids.dtype == length.dtype == np.int32
    assert ids.shape == (len(length), route.length)
    assert length.shape == (len(ids), 1)
    assert 1 <= len(ids) <= route.batch
    behind = np.arange(route.length) >= length
    assert (ids[behind] == PAD).all()
    assert (ids[~behind] != PAD).all()
    return np.column_stack([ids[:, 0], length[:, 0], np.full(len(ids), route.length)]).astype(np.float32)


def route(length: int, answer: str = "together", batch: int = 4) -> BucketRoute:
    return BucketRoute(length, f"encoder_{length}", batch, answer)


def config(*buckets: BucketRoute, **changes: Any) -> EntryConfig:
    """The settings of an embedding model with these buckets."""
    own = EntryConfig(
        max_tokens=buckets[-1].length,
        max_text_bytes=1000,
        max_request_bytes=10_000,
        tokenizer_threads=1,
        wake_after_ms=0,
        pad_id=PAD,
        output="EMBEDDING",
        size=DIM,
        late_bound=2,
        long_workers=1,
        long_bound=64,
        long_background_every=5,
        timeouts_ms={"interactive": 600_000.0, "background": 600_000.0},
        degrade=None,
        buckets=buckets,
        task="embedding",
        pair="none",
        segment=False,
        labels=(),
        dimensions=(),
        normalize=True,
        prompts={},
        default_prompt=None,
        overlap=4,
        max_windows=64,
        aggregation="simple",
        max_answer_tokens=30,
    )
    return replace(own, **changes)


class Mailbox:
    """Takes late answers and counts them; stands for the response senders."""

    def __init__(self) -> None:
        self.sent: list[Ticket] = []
        self._changed = threading.Condition()

    def __call__(self, sent: Ticket) -> None:
        with self._changed:
            self.sent.append(sent)
            self._changed.notify_all()

    def expect(self, count: int) -> list[Ticket]:
        """Wait for `count` answers in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sent) >= count, PATIENCE_S), f"{len(self.sent)} of {count}"
        return self.sent
