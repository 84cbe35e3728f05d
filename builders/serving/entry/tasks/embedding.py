"""Vectors: windows averaged by their tokens, cut to a smaller size on request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..ticket import Ticket
from ..tokenise import Piece
from .windows import weighted_mean


class Embedding:
    """EMBEDDING FP32 [n, size], or [n, d] with the request's `dimensions`.

    A text of one piece gets its row as the lane made it. Windows are averaged, weighted by their own tokens. What was
    averaged or cut has another length than 1, so it is scaled again when the model's vectors have length 1.

    Args:
        size: of the model's vectors.
        normalize: they have length 1.
    """

    output = "EMBEDDING"

    def __init__(self, *, size: int, normalize: bool):
        """See the class."""
        self._size, self._normalize = size, normalize

    def __call__(self, ticket: Ticket) -> NDArray[np.float32]:
        """See the class."""
        size = ticket.question.options.dimensions or self._size
        if not ticket.rows:
            return np.empty((0, size), dtype=np.float32)
        if len(ticket.pieces) == 1:
            # The usual request: no copy.
            vectors = ticket.rows[0][np.newaxis]
        elif len(ticket.pieces) == len(ticket.tokens):
            vectors = np.stack(ticket.rows)
        else:
            vectors = np.stack([self._of_text(text.pieces, own) for text, own in ticket.texts()])
        return vectors if size == self._size else self._scaled(np.ascontiguousarray(vectors[:, :size]))

    def _of_text(self, pieces: Sequence[Piece], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        if len(rows) == 1:
            return rows[0]
        (vector,) = self._scaled(weighted_mean(pieces, rows)[np.newaxis])
        return np.asarray(vector)

    def _scaled(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        return _to_length_1(vectors) if self._normalize else vectors


def _to_length_1(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row scaled to length 1; a row of zeros stays (torch.nn.functional.normalize's rule)."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: NDArray[np.float32] = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled
