"""Decoding: good texts come through unchanged, a bad one is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.serving.entry.errors import Refusal
from builders.serving.entry.request import Question
from builders.serving.entry.request import read_question as read_array


def read_question(texts: list[bytes], parameters: str, limit: int) -> Question | Refusal:
    """As Triton hands the texts over: BYTES [n, 1]."""
    column = np.empty((len(texts), 1), dtype=np.object_)
    column[:, 0] = texts
    return read_array(column, parameters, limit, 10 * limit)


def refused(raw: list[bytes], parameters: str = "", limit: int = 100) -> str:
    answer = read_question(raw, parameters, limit)
    assert isinstance(answer, Refusal)
    assert answer.kind == "invalid"
    return answer.message


@given(st.lists(st.text(max_size=20), max_size=5))
def test_texts_unchanged_when_utf8(texts: list[str]) -> None:
    assert read_question([text.encode() for text in texts], "", 1000) == Question(tuple(texts), "end")


@pytest.mark.parametrize("text", ["", "Я", "\U0001f600", "a\0b", "\ufeffx", "e\u0301", " "])
def test_unusual_text_kept_as_it_is(text: str) -> None:
    assert read_question([text.encode()], "", 100) == Question((text,), "end")


@pytest.mark.parametrize(
    ("raw", "byte", "position"),
    [
        (b"\xff", "0xff", 0),
        (b"ab\xc3", "0xc3", 2),
        ("lone \ud800".encode("utf-8", "surrogatepass"), "0xed", 5),
        (b"\xc0\x80", "0xc0", 0),
    ],
)
def test_bytes_that_are_not_utf8_refused_with_text_byte_and_position(raw: bytes, byte: str, position: int) -> None:
    message = refused([b"good", raw, b"good"])
    assert message.startswith(f"text 1 is not UTF-8: byte {byte} at position {position}")
    assert "encode the text as UTF-8" in message


def test_first_text_at_fault_named_when_several_are() -> None:
    assert refused([b"good", b"\xff", b"x" * 101]).startswith("text 1 is not UTF-8")
    assert refused([b"good", b"x" * 101, b"\xff"]).startswith("text 1 has 101 bytes")


@pytest.mark.parametrize("size", [99, 100])
def test_text_accepted_up_to_the_limit(size: int) -> None:
    assert read_question([b"x" * size], "", 100) == Question(("x" * size,), "end")


def test_text_above_the_limit_refused_with_both_sizes() -> None:
    message = refused([b"", b"x" * 101])
    assert message == "text 1 has 101 bytes; limit: 100 (entry.max_text_bytes); split the text"


def test_limit_counts_bytes_and_not_characters() -> None:
    assert isinstance(read_question(["é".encode() * 50], "", 100), Question)
    assert "102 bytes" in refused(["é".encode() * 51])


@pytest.mark.parametrize("truncate", ["end", "error"])
def test_truncate_taken_from_the_parameters(truncate: str) -> None:
    answer = read_question([b"x"], json.dumps({"truncate": truncate}), 100)
    assert isinstance(answer, Question)
    assert answer.truncate == truncate


@pytest.mark.parametrize("parameters", ["", "{}", '{"class": "batch", "other": 3}'])
def test_end_cut_when_the_parameters_do_not_say(parameters: str) -> None:
    answer = read_question([b"x"], parameters, 100)
    assert isinstance(answer, Question)
    assert answer.truncate == "end"


@pytest.mark.parametrize("value", ["start", "END", "", 1, True, None])
def test_unknown_truncate_refused_with_what_is_allowed(value: object) -> None:
    message = refused([b"x"], json.dumps({"truncate": value}))
    assert message == f"parameter truncate is {value!r}; allowed: 'end' or 'error'"


def test_no_texts_is_a_question_without_texts() -> None:
    assert read_question([], "", 100) == Question((), "end")


@pytest.mark.parametrize("shape", [(2, 2), (1, 0), (3,)])
def test_shape_that_is_not_one_text_a_row_refused(shape: tuple[int, ...]) -> None:
    answer = read_array(np.full(shape, b"a", dtype=np.object_), "", 100, 1000)
    assert isinstance(answer, Refusal)
    assert str(list(shape)) in answer.message
    assert "[n, 1]" in answer.message


def test_texts_above_the_limit_of_a_request_refused_with_both_sizes() -> None:
    texts = [b"a" * 60] * 17
    answer = read_question(texts, "", 100)
    assert isinstance(answer, Refusal)
    assert "1020 bytes" in answer.message
    assert "1000" in answer.message
    assert isinstance(read_question(texts[:16], "", 100), Question)
