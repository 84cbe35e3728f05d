"""Entities from scores per token, with the strategies of transformers' TokenClassificationPipeline.

Semantics as in transformers 5.24, `pipelines/token_classification.py`: which tokens continue a word, how a word gets
one label, and which neighbours are one entity. Windows are merged here token by token before anything is grouped, so
that an entity on the edge of a window comes out whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import Aggregation
from ..ticket import Ticket
from ..tokenise import Piece, Spans
from .windows import DECIMALS, column

#: The label of what is no entity.
OUTSIDE = "O"


class Vocabulary(Protocol):
    """What is needed of the tokeniser."""

    @property
    def marks_subwords(self) -> bool:
        """A token that continues a word is written with a prefix."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """Number of the unknown token."""
        ...

    def join(self, tokens: list[str]) -> str:
        """Tokens as readable text."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A token, or a word, with its label.

    Attributes:
        label: the best one.
        score: its score.
        word: as the vocabulary writes it.
        start: first character.
        end: the character behind the last.
    """

    label: str
    score: float
    word: str
    start: int
    end: int


class Entities:
    """ENTITIES BYTES [n, 1]: a JSON list of objects with `entity` or `entity_group`, `score`, `word`, `start`, `end`.

    `start` and `end` count characters (code points) of the text.

    Args:
        labels: names by number.
        vocabulary: the tokeniser.
    """

    output = "ENTITIES"

    def __init__(self, labels: Sequence[str], vocabulary: Vocabulary):
        """See the class."""
        self._labels, self._vocabulary = tuple(labels), vocabulary
        self._unknown, self._marked = vocabulary.unknown_id, vocabulary.marks_subwords

    def __call__(self, ticket: Ticket) -> NDArray[np.object_]:
        """See the class."""
        aggregation = ticket.question.options.aggregation
        documents = []
        for text, (tokens, rows) in zip(ticket.question.texts, ticket.texts(), strict=True):
            if tokens.spans is None:
                raise ValueError("the tokeniser kept no spans; open it with spans=True")
            first = min(piece.start for piece in tokens.pieces)
            scores = merged_scores(tokens.pieces, rows)
            documents.append(self.find(text, _part_of(tokens.spans, first, len(scores)), scores, aggregation))
        return column(documents)

    def find(
        self, text: str, spans: Spans, scores: NDArray[np.float32], aggregation: Aggregation
    ) -> list[dict[str, Any]]:
        """The entities of one text.

        Args:
            text: the text.
            spans: its tokens.
            scores: FP32 [tokens, labels].
            aggregation: see the contract; `none` gives one entity a token.
        """
        words, continues = self._words(text, spans)
        # One token a word where words do not matter: what is grouped then are the tokens.
        alone = aggregation in ("none", "simple")
        parts = []
        for begin, end in _runs([not alone and more for more in continues]):
            number, score = _label(scores[begin:end], aggregation)
            word = words[begin] if alone else self._vocabulary.join(words[begin:end])
            parts.append(_Part(self._labels[number], score, word, spans.offsets[begin][0], spans.offsets[end - 1][1]))
        if aggregation == "none":
            return [_entity("entity", part.label, [part], part.word) for part in parts if part.label != OUTSIDE]
        groups = [parts[begin:end] for begin, end in _runs(_continues_entity(parts))]
        return [
            _entity("entity_group", name, group, self._vocabulary.join([part.word for part in group]))
            for group in groups
            # A group's name is what follows the first dash, whatever stands before it.
            if (name := group[0].label.split("-", 1)[-1]) != OUTSIDE
        ]

    def _words(self, text: str, spans: Spans) -> tuple[list[str], list[bool]]:
        """Each token as it is written, and whether it continues the word before it."""
        words, continues = [], []
        for number, token, (start, end) in zip(spans.ids, spans.tokens, spans.offsets, strict=True):
            if number == self._unknown:
                words.append(text[start:end])
                continues.append(False)
                continue
            words.append(token)
            if self._marked:
                # The prefix makes the token longer than what it stands for.
                continues.append(len(token) != end - start)
            else:
                continues.append(start > 0 and " " not in text[start - 1 : start + 1])
        return words, continues


def merged_scores(pieces: Sequence[Piece], rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Scores of every own token of a text that a piece holds.

    A token in two windows counts where it is farther from the window's edge and so has more of the text around it; in
    the first of them where both are alike.

    Args:
        pieces: the windows of one text, in order, without gaps between them.
        rows: FP32 [L, labels] of each, padding included.

    Returns:
        FP32 [tokens, labels], from the first token of the first piece on.
    """
    if len(pieces) == 1:
        return rows[0][pieces[0].lead : pieces[0].lead + pieces[0].own]
    first, last = pieces[0].start, max(piece.start + piece.own for piece in pieces)
    merged = np.zeros((last - first, rows[0].shape[-1]), dtype=np.float32)
    depth = np.full(last - first, -1)
    for piece, row in zip(pieces, rows, strict=True):
        place = np.arange(piece.own)
        here = np.minimum(place, place[::-1])
        target = slice(piece.start - first, piece.start - first + piece.own)
        better = here > depth[target]
        merged[target][better] = row[piece.lead : piece.lead + piece.own][better]
        depth[target][better] = here[better]
    return merged


def _part_of(spans: Spans, first: int, count: int) -> Spans:
    """The tokens that have scores: all of them unless the text was cut."""
    if count == len(spans.ids):
        return spans
    part = slice(first, first + count)
    return Spans(spans.ids[part], spans.tokens[part], spans.offsets[part], spans.words[part])


def _label(scores: NDArray[np.float32], aggregation: Aggregation) -> tuple[int, float]:
    """Number and score of the label of one word, FP32 [its tokens, labels]."""
    if len(scores) == 1 or aggregation == "first":
        one = scores[0]
    elif aggregation == "average":
        one = scores.mean(axis=0)
    else:
        one = scores[int(scores.max(axis=1).argmax())]
    number = int(one.argmax())
    return number, float(one[number])


def _runs(continues: Sequence[bool]) -> list[tuple[int, int]]:
    """Begin and end of each run: a place that does not continue the one before begins another."""
    begins = [place for place, more in enumerate(continues) if place == 0 or not more]
    return list(zip(begins, [*begins[1:], len(continues)], strict=True)) if begins else []


def _continues_entity(parts: Sequence[_Part]) -> list[bool]:
    """Whether each part belongs to the entity of the one before: the same name, and no B- that begins a new one."""
    names = [part.label[2:] if part.label.startswith(("B-", "I-")) else part.label for part in parts]
    return [
        place > 0 and names[place] == names[place - 1] and not part.label.startswith("B-")
        for place, part in enumerate(parts)
    ]


def _entity(key: str, name: str, parts: Sequence[_Part], word: str) -> dict[str, Any]:
    score = float(np.mean([part.score for part in parts]))
    return {
        key: name,
        "score": round(score, DECIMALS),
        "word": word,
        "start": parts[0].start,
        "end": parts[-1].end,
    }
