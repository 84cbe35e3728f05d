"""What is still owed to one request, until its one answer or one error has left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .errors import Refusal
from .tokenise import Tokens

_LOG = logging.getLogger(__name__)


class Ticket:
    """One request from its tokens to its answer. Groups on several threads may settle parts of it.

    Args:
        tokens: the request's texts as tokens, in order.
        dim: size of one vector.
        cancelled: says whether the client has given up.

    Attributes:
        vectors: FP32 [n, dim]; complete once `settle` has returned True and `refusal` is None.
        refusal: the first thing that went wrong.
        late: the answer leaves through `send` and not with the batch.
        send: called once with the finished ticket when `late`.
    """

    def __init__(self, tokens: list[Tokens], dim: int, cancelled: Callable[[], bool] = lambda: False):
        """See the class."""
        self.tokens = tokens
        self.vectors: NDArray[np.float32] = np.empty((len(tokens), dim), dtype=np.float32)
        self.refusal: Refusal | None = None
        self.late = False
        self.send: Callable[[Ticket], None] | None = None
        self.cancelled = cancelled
        self._owed = len(tokens)
        self._lock = threading.Lock()

    @property
    def given_up(self) -> bool:
        """No part of it needs computing any more: it was refused, or its client has gone."""
        if self.refusal is None and self._is_cancelled():
            self.refuse(Refusal("cancelled", "the request was cancelled by its client"))
        return self.refusal is not None

    @property
    def complete(self) -> bool:
        """Nothing is owed any more: `vectors` or `refusal` is the answer."""
        return self._owed == 0

    def refuse(self, refusal: Refusal) -> None:
        """Note what went wrong; the first reason stays."""
        with self._lock:
            self.refusal = self.refusal or refusal

    def settle(self, texts: int) -> bool:
        """Note that `texts` of its texts are done, with a vector or with a refusal.

        Returns:
            True exactly once: nothing is owed any more. A late ticket has been sent then.
        """
        with self._lock:
            self._owed -= texts
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
