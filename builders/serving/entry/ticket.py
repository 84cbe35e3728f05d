"""What is still owed to one request, until its one answer or one error has left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import Refusal
from .request import Question
from .tokenise import Piece, Tokens
from .tracing import Parent

_LOG = logging.getLogger(__name__)
#: Stands for a row that no lane has answered yet.
_NOTHING: NDArray[np.float32] = np.empty(0, dtype=np.float32)


class Ticket:
    """One request from its tokens to its answer. Groups on several threads may settle parts of it.

    Args:
        tokens: the request's texts as tokens, in order.
        question: what the request asks; a refused one may leave it out.
        cancelled: says whether the client has given up.

    Attributes:
        pieces: the rows of bucket models that the texts are made of, in order; several for a text cut into windows.
        rows: what the lanes answered for each piece, FP32 [size] or [L, size]; all there once `settle` has returned
            True and `refusal` is None.
        refusal: the first thing that went wrong.
        late: the answer leaves through `send` and not with the batch.
        send: called once with the finished ticket when `late`.
        parent: the request's place in its trace; None when it is not traced.
    """

    def __init__(
        self,
        tokens: Sequence[Tokens],
        question: Question | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        """See the class."""
        self.tokens = tokens
        self.question = question if question is not None else Question(())
        self.pieces: list[Piece] = [piece for text in tokens for piece in text.pieces]
        # Each place is written by the one group that holds the piece.
        self.rows: list[NDArray[np.float32]] = [_NOTHING] * len(self.pieces)
        self.refusal: Refusal | None = None
        self.late = False
        self.send: Callable[[Ticket], None] | None = None
        self.parent: Parent | None = None
        self.cancelled = cancelled
        self._owed = len(self.pieces)
        self._lock = threading.Lock()

    def texts(self) -> Iterator[tuple[Tokens, list[NDArray[np.float32]]]]:
        """Each text with the lanes' answers for its pieces, in order."""
        begin = 0
        for text in self.tokens:
            end = begin + len(text.pieces)
            yield text, self.rows[begin:end]
            begin = end

    @property
    def given_up(self) -> bool:
        """No part of it needs computing any more: it was refused, or its client has gone."""
        if self.refusal is None and self._is_cancelled():
            self.refuse(Refusal("cancelled", "the request was cancelled by its client"))
        return self.refusal is not None

    @property
    def complete(self) -> bool:
        """Nothing is owed any more: `rows` or `refusal` is the answer."""
        return self._owed == 0

    def refuse(self, refusal: Refusal) -> None:
        """Note what went wrong; the first reason stays."""
        with self._lock:
            self.refusal = self.refusal or refusal

    def settle(self, pieces: int) -> bool:
        """Note that `pieces` of its pieces are done, with a row or with a refusal.

        Returns:
            True exactly once: nothing is owed any more. A late ticket has been sent then.
        """
        with self._lock:
            self._owed -= pieces
            done = self._owed == 0
        if done and self.late and self.send is not None:
            try:
                self.send(self)
            except Exception:  # the client is gone; the other requests of the group still want their answers
                _LOG.exception("an answer could not be sent")
        return done

    def _is_cancelled(self) -> bool:
        try:
            return self.cancelled()
        except Exception:  # not knowing is no reason to refuse
            _LOG.exception("whether a request was cancelled could not be asked")
            return False
