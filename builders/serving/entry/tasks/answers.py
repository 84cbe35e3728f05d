"""The best span of a context, from start and end logits per token.

Semantics of transformers' question-answering pipeline (removed in transformers 5; `select_starts_ends` and
`decode_spans` of its document twin are the same): softmax over the context's tokens and the first special token,
where models put "no answer"; that token is never an answer itself. So a window without an answer gives its spans
little, and the spans of several windows can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ticket import Ticket
from ..tokenise import Piece, Spans
from .windows import DECIMALS, column


@dataclass(frozen=True)
class Span:
    """Own tokens `first` to `last` of the context, both included, and the product of their probabilities."""

    first: int
    last: int
    score: float


class Answers:
    """ANSWERS BYTES [n, 1]: a JSON object with `answer`, `score`, `start`, `end`.

    `start` and `end` count characters (code points) of the context, widened to whole words. The best real span is given
    however little its score is; a context without tokens gets an empty answer with score 0.

    Args:
        max_tokens: longest answer, tokens.
    """

    output = "ANSWERS"

    def __init__(self, max_tokens: int):
        """See the class."""
        self._max_tokens = max_tokens

    def __call__(self, ticket: Ticket) -> NDArray[np.object_]:
        """See the class."""
        documents = []
        for context, (tokens, rows) in zip(ticket.question.pairs or (), ticket.texts(), strict=True):
            if tokens.spans is None:
                raise ValueError("the tokeniser kept no spans; open it with spans=True")
            span = best_span(tokens.pieces, rows, self._max_tokens)
            documents.append(_answer(context, tokens.spans, span))
        return column(documents)


def best_span(pieces: Sequence[Piece], rows: Sequence[NDArray[np.float32]], max_tokens: int) -> Span | None:
    """The best span of all windows of one context; the first of equal ones.

    Args:
        pieces: the windows.
        rows: FP32 [L, 2] of each, start and end logits, padding included.
        max_tokens: longest span, tokens.

    Returns:
        The span, or None when no window has a token of the context.
    """
    spans = [span for piece, row in zip(pieces, rows, strict=True) if (span := _window_span(piece, row, max_tokens))]
    return max(spans, key=lambda span: span.score, default=None)


def _window_span(piece: Piece, row: NDArray[np.float32], max_tokens: int) -> Span | None:
    if piece.own == 0:
        return None
    # The first token is special wherever something stands before the context: there "no answer" gets its share.
    none = row[:1] if piece.lead > 0 else row[:0]
    logits = np.concatenate([none, row[piece.lead : piece.lead + piece.own]]).astype(np.float64)
    highest = logits.max(axis=0)
    # As logarithms, in which a small share is not lost.
    shares = logits - highest - np.log(np.exp(logits - highest).sum(axis=0))
    start, end = shares[len(none) :].T
    most = min(max_tokens, piece.own)
    # [own, most]: the span that begins at a token and has 1, 2, … tokens; none that ends behind the last one.
    ends = np.lib.stride_tricks.sliding_window_view(np.pad(end, (0, most - 1), constant_values=-np.inf), most)
    scores = start[:, np.newaxis] + ends
    first, more = divmod(int(scores.argmax()), most)
    score = float(np.exp(scores[first, more]))
    return Span(piece.start + first, piece.start + first + more, score)


def _answer(context: str, spans: Spans, span: Span | None) -> dict[str, Any]:
    if span is None:
        return {"answer": "", "score": 0.0, "start": 0, "end": 0}
    start, end = _word_edge(spans, span.first, -1), _word_edge(spans, span.last, 1)
    return {"answer": context[start:end], "score": round(span.score, DECIMALS), "start": start, "end": end}


def _word_edge(spans: Spans, place: int, step: int) -> int:
    """The character where the word of a token begins (step -1) or ends (step 1)."""
    word = spans.words[place]
    if word is not None:
        while 0 <= place + step < len(spans.words) and spans.words[place + step] == word:
            place += step
    return spans.offsets[place][0 if step < 0 else 1]
