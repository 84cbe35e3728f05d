"""What the windows of one text share in every task: how much each counts, and a column of JSON documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tokenise import Piece

#: Decimals of a score in JSON: FP32 does not carry more.
DECIMALS = 6


def weighted_mean(pieces: Sequence[Piece], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Mean of the windows' rows, each weighted by its own tokens, so that special tokens count for nothing.

    Args:
        pieces: the windows of one text; at least one has own tokens.
        rows: FP32 [size] of each.

    Returns:
        FP32 [size].
    """
    mean: NDArray[np.float32] = np.average(np.stack(rows), axis=0, weights=[piece.own for piece in pieces]).astype(
        np.float32
    )
    return mean


def column(documents: Sequence[Any]) -> NDArray[np.object_]:
    """One JSON document a row, BYTES [n, 1], UTF-8.

    Raises:
        ValueError: a score is not finite, which JSON cannot say.
    """
    result = np.empty((len(documents), 1), dtype=np.object_)
    for index, document in enumerate(documents):
        result[index, 0] = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return result
