"""What a call gives: the arrays of its answers, held to the entry's contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult

from clients.errors import ServerFailure


class TextEncoding(NamedTuple):
    """What one text gave: `embedding` float32 [dim] (a view), `tokens` used and tokens `cut`."""

    embedding: npt.NDArray[np.float32]
    tokens: int
    cut: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodeResult:
    """What n texts gave, in their order. Its length is n; iterating gives one TextEncoding per text."""

    embeddings: npt.NDArray[np.float32]
    """float32 [n, dim]."""
    tokens: npt.NDArray[np.int32]
    """int32 [n]: tokens the model read, special tokens included."""
    cut: npt.NDArray[np.int32]
    """int32 [n]: tokens beyond the model's longest text, which were cut off; 0 for a text read whole."""

    def __len__(self) -> int:
        """Number of texts, n."""
        return len(self.embeddings)

    def __iter__(self) -> Iterator[TextEncoding]:
        """One TextEncoding per text, in order."""
        for embedding, tokens, cut in zip(self.embeddings, self.tokens, self.cut, strict=True):
            yield TextEncoding(embedding, int(tokens), int(cut))


def read_answer(answer: InferResult, part: range, url: str) -> EncodeResult:
    """The arrays of one answer, held to the entry's contract. They are views of the answer, read-only."""
    n, shapes = len(part), {"EMBEDDING": "FP32 [n, dim]", "TOKENS": "INT32 [n, 1]", "CUT": "INT32 [n, 1]"}
    arrays = {name: answer.as_numpy(name) for name in shapes}
    for name, array in arrays.items():
        dtype = np.float32 if name == "EMBEDDING" else np.int32
        fits = array is not None and array.dtype == dtype and array.ndim == 2 and len(array) == n
        if not fits or (name != "EMBEDDING" and array.shape[1] != 1):
            raise ServerFailure(
                f"the answer's {name} is not the entry model's",
                value=None if array is None else f"{array.dtype} {list(array.shape)}",
                limit=f"{shapes[name]} with n = {n}",
                remedy="name the entry model of an embedding repository",
                url=url,
                texts=part,
            )
    return EncodeResult(arrays["EMBEDDING"], arrays["TOKENS"][:, 0], arrays["CUT"][:, 0])


def joined(parts: Sequence[EncodeResult], url: str) -> EncodeResult:
    """One result of many, in new arrays."""
    dims = sorted({part.embeddings.shape[1] for part in parts})
    if len(dims) > 1:
        raise ServerFailure(
            "the requests of the call were answered by models of different dim",
            value=dims,
            remedy="call again; the served model changed meanwhile",
            url=url,
        )
    return EncodeResult(
        np.concatenate([part.embeddings for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.cut for part in parts]),
    )


def empty(dim: int) -> EncodeResult:
    """The result of no texts."""
    return EncodeResult(np.empty((0, dim), np.float32), np.empty(0, np.int32), np.empty(0, np.int32))
