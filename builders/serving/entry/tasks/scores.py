"""Scores of labels: of classification, and of reranking where the best window speaks for its document."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ticket import Ticket
from .windows import weighted_mean


class MeanScores:
    """SCORES FP32 [n, size] of classification: windows averaged, weighted by their own tokens.

    The lanes apply the activation, so a mean of softmax scores is a distribution again.

    Args:
        size: number of labels.
    """

    output = "SCORES"

    def __init__(self, *, size: int):
        """See the class."""
        self._size = size

    def __call__(self, ticket: Ticket) -> NDArray[np.float32]:
        """See the class."""
        rows = [own[0] if len(own) == 1 else weighted_mean(text.pieces, own) for text, own in ticket.texts()]
        return np.stack(rows) if rows else np.empty((0, self._size), dtype=np.float32)


class BestScores:
    """SCORES FP32 [n, size] of reranking: those of the window with the highest score.

    A document is relevant when a part of it is. With several labels the last one is the relevant one.

    Args:
        size: number of labels.
    """

    output = "SCORES"

    def __init__(self, *, size: int):
        """See the class."""
        self._size = size

    def __call__(self, ticket: Ticket) -> NDArray[np.float32]:
        """See the class."""
        rows = [max(own, key=lambda row: float(row[-1])) for _, own in ticket.texts()]
        return np.stack(rows) if rows else np.empty((0, self._size), dtype=np.float32)
