"""Spans, compared with transformers' own functions and with every span tried one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from builders.serving.entry.request import Options, Question
from builders.serving.entry.tasks.answers import Answers, best_span
from builders.serving.entry.ticket import Ticket
from builders.serving.entry.tokenise import Piece, Tokeniser, Tokens
from tests.serving.tasks.parts import answered, window


def logits(piece: Piece, chance: np.random.Generator, padding: int = 4) -> NDArray[np.float32]:
    """Random start and end logits of a piece in a longer bucket; the padding's are large, and must not count."""
    rows = chance.normal(size=(piece.ids.size + padding, 2)).astype(np.float32) * 3
    rows[piece.ids.size :] = 100
    return rows


def tried(piece: Piece, row: NDArray[np.float32], most: int) -> tuple[int, int, float]:
    """The best span by trying each."""
    keep = ([0] if piece.lead else []) + list(range(piece.lead, piece.lead + piece.own))
    shares = np.exp(row[keep].astype(np.float64))
    shares /= shares.sum(0)
    shares = shares[-piece.own :]
    spans = [
        (first, last, shares[first, 0] * shares[last, 1])
        for first in range(piece.own)
        for last in range(first, min(first + most, piece.own))
    ]
    first, last, score = max(spans, key=lambda span: span[2])
    return piece.start + first, piece.start + last, score


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), own=st.integers(1, 40), lead=st.integers(0, 9), most=st.integers(1, 60))
def test_best_span_of_a_window_equals_trying_each(seed: int, own: int, lead: int, most: int) -> None:
    piece = window(7, own, lead)
    row = logits(piece, np.random.default_rng(seed))
    span = best_span([piece], [row], most)
    assert span
    assert (span.first, span.last) == tried(piece, row, most)[:2]
    assert np.isclose(span.score, tried(piece, row, most)[2], rtol=1e-5)
    assert 1 <= span.last - span.first + 1 <= most


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [1, 3, 30])
def test_best_span_equals_transformers_own(seed: int, most: int) -> None:
    pipeline = pytest.importorskip("transformers.pipelines.document_question_answering")
    piece = window(0, 25, lead=6)
    row = logits(piece, np.random.default_rng(seed), padding=5)
    context = np.zeros(len(row), dtype=int)
    context[6:31] = 1
    context[0] = 1  # where "no answer" is; it may not be the answer
    real = (np.arange(len(row)) < piece.ids.size).astype(int)
    starts, ends, scores, _ = pipeline.select_starts_ends(
        row[None, :, 0], row[None, :, 1], 1 - context, real[None], max_answer_len=most
    )
    span = best_span([piece], [row], most)
    assert span
    assert (span.first + 6, span.last + 6) == (int(np.ravel(starts)[0]), int(np.ravel(ends)[0]))
    assert np.isclose(span.score, np.ravel(scores)[0], rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5))
def test_best_span_of_several_windows_is_the_best_of_each(seed: int, sizes: list[int]) -> None:
    chance = np.random.default_rng(seed)
    pieces = [window(5 * number, own, lead=3) for number, own in enumerate(sizes)]
    rows = [logits(piece, chance) for piece in pieces]
    best = max((tried(piece, row, 4) for piece, row in zip(pieces, rows, strict=True)), key=lambda span: span[2])
    span = best_span(pieces, rows, 4)
    assert span
    assert (span.first, span.last) == best[:2]


def test_window_that_says_no_answer_gives_way_to_one_with_an_answer() -> None:
    pieces = [window(0, 3, lead=1), window(3, 3, lead=1)]
    nothing, something = np.zeros((5, 2)), np.zeros((5, 2))
    nothing[0], nothing[2] = 9, 5  # its best span is good among its own, but "no answer" is better
    something[3] = 3
    span = best_span(pieces, [nothing.astype(np.float32), something.astype(np.float32)], 30)
    assert span
    assert (span.first, span.last) == (5, 5)


def test_real_span_given_when_no_answer_is_far_more_likely() -> None:
    row = np.zeros((5, 2), dtype=np.float32)
    row[0] = 2000
    row[2, 0] = row[3, 1] = 1
    span = best_span([window(0, 3)], [row], 30)
    assert span
    assert (span.first, span.last, span.score) == (1, 2, 0.0)


def test_first_of_equal_spans_given() -> None:
    span = best_span([window(0, 5)], [np.zeros((7, 2), dtype=np.float32)], 3)
    assert span
    assert (span.first, span.last) == (0, 0)


def test_no_span_without_tokens_of_the_context() -> None:
    assert best_span([window(0, 0)], [np.zeros((4, 2), dtype=np.float32)], 30) is None


# As documents


QUESTION = "who came"


@pytest.fixture(scope="module")
def tokenise(minilm_tokenizer: Path) -> Tokeniser:
    return Tokeniser(minilm_tokenizer, 16, spans=True, overlap=2)


def ask(tokenise: Tokeniser, context: str, answer: tuple[int, int], **options: Any) -> dict[str, Any]:
    """The document when the model is sure of the tokens `answer` of the context."""
    question = Question((QUESTION,), (context,), Options(**options))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    ticket = answered(tokens, [sure(piece, answer) for piece in tokens[0].pieces], question)
    ((document,),) = Answers(30)(ticket)
    return dict(json.loads(document))


def sure(piece: Piece, answer: tuple[int, int]) -> NDArray[np.float32]:
    row = np.zeros((16, 2), dtype=np.float32)
    for column, place in enumerate(answer):
        if 0 <= place - piece.start < piece.own:
            row[piece.lead + place - piece.start, column] = 20
    return row


def test_answer_with_its_characters(tokenise: Tokeniser) -> None:
    context = "Oh! naïve 🚲 came."
    document = ask(tokenise, context, (2, 3))
    assert list(document) == ["answer", "score", "start", "end"]
    assert document["answer"] == "naïve 🚲" == context[document["start"] : document["end"]]
    assert 0.9 < document["score"] <= 1


def test_answer_widened_to_whole_words(tokenise: Tokeniser) -> None:
    tokens = tokenise([QUESTION], ["an unbelievably far place"])[0].spans
    assert tokens
    assert tokens.tokens[1:4] == ["un", "##bel", "##ie"], "another vocabulary needs another word here"
    assert ask(tokenise, "an unbelievably far place", (2, 2))["answer"] == "unbelievably"


@pytest.mark.parametrize("context", ["", " ", "\u200b"])
def test_empty_answer_when_the_context_has_no_tokens(tokenise: Tokeniser, context: str) -> None:
    assert ask(tokenise, context, (0, 0)) == {"answer": "", "score": 0.0, "start": 0, "end": 0}


@pytest.mark.parametrize("place", [0, 9, 10, 33, 59])
def test_answer_found_in_whatever_window_it_is(tokenise: Tokeniser, place: int) -> None:
    context = " ".join(f"{number}" for number in range(60))
    assert ask(tokenise, context, (place, place), truncate="chunk")["answer"] == str(place)


def test_answer_of_a_context_cut_at_its_start_keeps_its_place(tokenise: Tokeniser) -> None:
    context = " ".join(f"{number}" for number in range(60))
    document = ask(tokenise, context, (58, 59), truncate="start")
    assert document["answer"] == "58 59" == context[document["start"] : document["end"]]


def test_answers_of_several_questions_stay_in_their_rows(tokenise: Tokeniser) -> None:
    question = Question((QUESTION,) * 3, ("a b c", "d e f", "g h i"))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    ticket = answered(tokens, [sure(text.pieces[0], (n, n)) for n, text in enumerate(tokens)], question)
    assert [json.loads(document)["answer"] for (document,) in Answers(30)(ticket)] == ["a", "e", "i"]


def test_score_that_is_no_number_raises_instead_of_breaking_the_json(tokenise: Tokeniser) -> None:
    question = Question((QUESTION,), ("a b c",))
    (tokens,) = tokenise.read([question])
    assert isinstance(tokens, list)
    ticket: Ticket = answered(tokens, [np.full((16, 2), np.nan)], question)
    with pytest.raises(ValueError, match="not JSON compliant"):
        Answers(30)(ticket)


def test_tokens_without_spans_named(tokenise: Tokeniser) -> None:
    bare: list[Tokens] = [Tokens((window(0, 3),), 0)]
    with pytest.raises(ValueError, match="spans=True"):
        Answers(30)(answered(bare, [np.zeros((5, 2))], Question(("a",), ("b",))))
