"""What a call gives, task by task: arrays and values in the order of its texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class TextEncoding(NamedTuple):
    """What one text gave: `embedding` float32 [dim] (a view), `tokens` used and tokens `cut`."""

    embedding: Floats
    tokens: int
    cut: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodeResult:
    """What n texts gave, in their order. Its length is n; iterating gives one TextEncoding per text."""

    embeddings: Floats
    """float32 [n, dim]."""
    tokens: Ints
    """int32 [n]: tokens the model read, special tokens included."""
    cut: Ints
    """int32 [n]: tokens beyond the model's longest text, which were cut off; 0 for a text read whole."""
    retries: int = 0
    """Requests of the call that were sent again (RetryPolicy)."""

    def __len__(self) -> int:
        """Number of texts, n."""
        return len(self.embeddings)

    def __iter__(self) -> Iterator[TextEncoding]:
        """One TextEncoding per text, in order."""
        for embedding, tokens, cut in zip(self.embeddings, self.tokens, self.cut, strict=True):
            yield TextEncoding(embedding, int(tokens), int(cut))


class LabelScore(NamedTuple):
    """A label of the model and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class ClassifyResult:
    """Scores of n texts. Its length is n; iterating gives each text's labels, the best first."""

    labels: tuple[str, ...]
    """The model's labels, in the order of the columns."""
    scores: Floats
    """float32 [n, labels], as the model's activation gives them (softmax, sigmoid or none)."""
    tokens: Ints
    """int32 [n], as in EncodeResult."""
    cut: Ints
    """int32 [n], as in EncodeResult."""
    top_k: int | None = None
    """How many labels iterating gives; None all."""
    retries: int = 0
    """As in EncodeResult."""

    def __len__(self) -> int:
        """Number of texts, n."""
        return len(self.scores)

    def __iter__(self) -> Iterator[tuple[LabelScore, ...]]:
        """For each text its `top_k` best labels; equal scores stay in the model's order."""
        for row in self.scores:
            best = np.argsort(-row, kind="stable")[: self.top_k]
            yield tuple(LabelScore(self.labels[column], float(row[column])) for column in best)


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its position in the call's list, and its score for the query."""

    index: int
    score: float
    document: str


@dataclass(frozen=True, slots=True, eq=False)
class RerankResult:
    """The documents for a query, the best first. Iterating gives RankedDocuments."""

    indices: npt.NDArray[np.int64]
    """int64 [m]: positions in the call's list; documents of equal score stay in its order."""
    scores: Floats
    """float32 [m], falling."""
    documents: tuple[str, ...]
    """The texts, m of them."""
    tokens: Ints
    """int32 [m]: tokens of query and document together."""
    cut: Ints
    """int32 [m]: tokens cut off the document."""
    retries: int = 0
    """As in EncodeResult."""

    def __len__(self) -> int:
        """Number of documents given back, m."""
        return len(self.indices)

    def __iter__(self) -> Iterator[RankedDocument]:
        """The documents, the best first."""
        for index, score, document in zip(self.indices, self.scores, self.documents, strict=True):
            yield RankedDocument(int(index), float(score), document)


class Entity(NamedTuple):
    """A part of a text with a label: `word` stands at characters `start` to `end` (the end excluded)."""

    label: str
    score: float
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class TagResult:
    """The entities of n texts. Its length is n; iterating gives each text's entities."""

    entities: tuple[tuple[Entity, ...], ...]
    """For each text, in the order they stand in it."""
    tokens: Ints
    """int32 [n], as in EncodeResult."""
    cut: Ints
    """int32 [n], as in EncodeResult."""
    retries: int = 0
    """As in EncodeResult."""

    def __len__(self) -> int:
        """Number of texts, n."""
        return len(self.entities)

    def __iter__(self) -> Iterator[tuple[Entity, ...]]:
        """The entities of each text."""
        return iter(self.entities)


class Answer(NamedTuple):
    """The answer to a question: `text` stands at characters `start` to `end` of its context (the end excluded)."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class AnswerResult:
    """The answers to n questions. Its length is n; iterating gives Answers."""

    answers: tuple[Answer, ...]
    """One per question."""
    tokens: Ints
    """int32 [n]: tokens of question and context together."""
    cut: Ints
    """int32 [n]: tokens cut off the context."""
    retries: int = 0
    """As in EncodeResult."""

    def __len__(self) -> int:
        """Number of questions, n."""
        return len(self.answers)

    def __iter__(self) -> Iterator[Answer]:
        """The answers in order."""
        return iter(self.answers)
