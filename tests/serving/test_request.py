"""Decoding: good texts come through unchanged, what is bad is named with its value, its limit and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from builders.serving.entry.config import EntryConfig
from builders.serving.entry.errors import Refusal
from builders.serving.entry.request import Options, Question, read_question
from tests.serving.parts import config, route

PROMPTS = {"query": "query: ", "document": "passage: ", "empty": ""}


def settings(task: str = "embedding", **changes: Any) -> EntryConfig:
    """Texts up to 100 bytes, requests up to 1000, 16 tokens."""
    own: dict[str, Any] = {"max_text_bytes": 100, "max_request_bytes": 1000, "task": task, **changes}
    return config(route(16), **own)


def column(texts: Sequence[bytes]) -> NDArray[np.object_]:
    """As Triton hands texts over: BYTES [n, 1]."""
    own = np.empty((len(texts), 1), dtype=np.object_)
    own[:, 0] = texts
    return own


def read(
    texts: Sequence[bytes],
    pairs: Sequence[bytes] | None = None,
    own: EntryConfig | None = None,
    **parameters: Any,
) -> Question | Refusal:
    text = json.dumps(parameters) if parameters else ""
    return read_question(column(texts), None if pairs is None else column(pairs), text, own or settings())


def refused(*arguments: Any, **parameters: Any) -> str:
    answer = read(*arguments, **parameters)
    assert isinstance(answer, Refusal)
    assert answer.kind == "invalid"
    return answer.message


def options(own: EntryConfig | None = None, pairs: Sequence[bytes] | None = None, **parameters: Any) -> Options:
    answer = read([b"x"], pairs, own, **parameters)
    assert isinstance(answer, Question), answer
    return answer.options


# Texts


@given(st.lists(st.text(max_size=20), max_size=5))
def test_texts_unchanged_when_utf8(texts: list[str]) -> None:
    assert read([text.encode() for text in texts]) == Question(tuple(texts))


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=5))
def test_pairs_unchanged_when_utf8(rows: list[tuple[str, str]]) -> None:
    texts, pairs = [row[0] for row in rows], [row[1] for row in rows]
    encoded = [text.encode() for text in texts], [pair.encode() for pair in pairs]
    assert read(*encoded, settings("reranking", pair="required")) == Question(tuple(texts), tuple(pairs))


@pytest.mark.parametrize("text", ["", "Я", "\U0001f600", "a\0b", "\ufeffx", "e\u0301", " ", "שלום", "\n" * 100])
def test_unusual_text_kept_as_it_is(text: str) -> None:
    assert read([text.encode()]) == Question((text,))


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


def test_pair_that_is_not_utf8_named() -> None:
    message = refused([b"a", b"b"], [b"c", b"\xff"], settings("reranking", pair="required"))
    assert message.startswith("the pair of text 1 is not UTF-8: byte 0xff at position 0")


def test_first_text_at_fault_named_when_several_are() -> None:
    assert refused([b"good", b"\xff", b"\xfe"]).startswith("text 1 is not UTF-8")
    assert refused([b"good", b"x" * 101, b"x" * 102]).startswith("text 1 has 101 bytes")


@pytest.mark.parametrize("size", [99, 100])
def test_text_accepted_up_to_the_limit(size: int) -> None:
    assert read([b"x" * size]) == Question(("x" * size,))


def test_text_above_the_limit_refused_with_both_sizes() -> None:
    assert refused([b"", b"x" * 101]) == "text 1 has 101 bytes; limit: 100 (entry.max_text_bytes); split the text"


def test_limit_counts_bytes_and_not_characters() -> None:
    assert isinstance(read(["é".encode() * 50]), Question)
    assert "102 bytes" in refused(["é".encode() * 51])


def test_limit_counts_both_texts_of_a_pair() -> None:
    own = settings("classification", pair="optional")
    assert isinstance(read([b"x" * 60], [b"y" * 40], own), Question)
    message = refused([b"x" * 60], [b"y" * 41], own)
    assert message == "text 0 and its pair have 101 bytes; limit: 100 (entry.max_text_bytes); split the text"


def test_texts_above_the_limit_of_a_request_refused_with_both_sizes() -> None:
    texts = [b"a" * 60] * 17
    message = refused(texts)
    assert "1020 bytes" in message
    assert "limit: 1000 a request (entry.max_request_bytes)" in message
    assert isinstance(read(texts[:16]), Question)
    halves = [b"a" * 30] * 17
    assert "1020 bytes" in refused(halves, halves, settings("classification", pair="optional"))


def test_one_text_held_to_its_own_limit_alone() -> None:
    assert isinstance(read([b"x" * 90], None, settings(max_request_bytes=50)), Question)
    assert "90 bytes together" in refused([b"x" * 45] * 2, None, settings(max_request_bytes=50))


def test_no_texts_is_a_question_without_texts() -> None:
    assert read([]) == Question(())


@pytest.mark.parametrize("shape", [(2, 2), (1, 0), (3,)])
def test_shape_that_is_not_one_text_a_row_refused(shape: tuple[int, ...]) -> None:
    wrong = np.full(shape, b"a", dtype=np.object_)
    own = settings("reranking", pair="required")
    for name, tensors in (("TEXT", (wrong, None)), ("TEXT_PAIR", (column([b"a"]), wrong))):
        answer = read_question(*tensors, "", settings() if tensors[1] is None else own)
        assert isinstance(answer, Refusal)
        assert answer.message == f"{name} has shape {list(shape)}; limit: [n, 1]; send one text a row"


# Pairs


def test_pair_refused_where_the_task_takes_single_texts() -> None:
    message = refused([b"a"], [b"b"])
    assert message == "TEXT_PAIR was sent; the task embedding takes single texts; send TEXT alone"


@pytest.mark.parametrize("task", ["reranking", "answering"])
def test_missing_pair_refused_where_the_task_needs_one(task: str) -> None:
    message = refused([b"a"], None, settings(task, pair="required"))
    assert message == f"TEXT_PAIR is missing; the task {task} needs one for each row of TEXT; send both"


def test_pair_may_come_or_not_where_it_is_optional() -> None:
    own = settings("classification", pair="optional")
    assert read([b"a"], None, own) == Question(("a",), None)
    assert read([b"a"], [b""], own) == Question(("a",), ("",))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pairs_refused_when_they_are_not_as_many_as_the_texts(count: int) -> None:
    message = refused([b"a", b"b"], [b"c"] * count, settings("reranking", pair="required"))
    assert message.startswith(f"TEXT_PAIR has {count} rows; limit: 2, one for each row of TEXT")


# Parameters


@pytest.mark.parametrize("parameters", ["", "{}", '{"class": "background", "other": 3}'])
def test_models_own_options_taken_when_the_parameters_do_not_say(parameters: str) -> None:
    answer = read_question(column([b"x"]), None, parameters, settings())
    assert answer == Question(("x",), None, Options("end", None, "", None, "simple"))


@pytest.mark.parametrize("truncate", ["end", "start", "error", "chunk"])
def test_truncate_taken_from_the_parameters(truncate: str) -> None:
    assert options(truncate=truncate).truncate == truncate


@pytest.mark.parametrize("value", ["middle", "END", "", 1, True, None, ["end"], {"end": 1}, 1.5, -1])
def test_unknown_truncate_refused_with_what_is_allowed(value: object) -> None:
    message = refused([b"x"], truncate=value)
    assert message == f"parameter truncate is {value!r}; allowed: 'end', 'start', 'error' or 'chunk'"


@pytest.mark.parametrize("overlap", [0, 1, 15])
def test_overlap_taken_from_the_parameters_with_chunk(overlap: int) -> None:
    assert options(truncate="chunk", overlap=overlap).overlap == overlap


@pytest.mark.parametrize("overlap", [-1, 16, 10**9, -(2**63)])
def test_overlap_outside_a_window_refused_with_the_limit(overlap: int) -> None:
    message = refused([b"x"], truncate="chunk", overlap=overlap)
    assert message.startswith(f"parameter overlap is {overlap}; limit: 0 to less than a window of 16 tokens")


@pytest.mark.parametrize("name", ["overlap", "dimensions"])
@pytest.mark.parametrize("value", ["8", True, False, 1.5, None, [2], ""])
def test_number_of_another_type_refused(name: str, value: object) -> None:
    message = refused([b"x"], None, settings(dimensions=(2,)), truncate="chunk", **{name: value})
    assert message == f"parameter {name} is {value!r}; limit: a whole number; send it as an integer"


@pytest.mark.parametrize("truncate", ["end", "start", "error"])
def test_overlap_refused_without_chunk(truncate: str) -> None:
    message = refused([b"x"], truncate=truncate, overlap=3)
    assert f"truncate is '{truncate}'" in message
    assert "only goes with truncate='chunk'" in message


def test_prompt_found_by_its_name() -> None:
    own = settings(prompts=PROMPTS, default_prompt="document")
    assert options(own, prompt="query").prompt == "query: "
    assert options(own).prompt == "passage: "
    assert options(own, prompt="").prompt == ""
    assert options(own, prompt="empty").prompt == ""
    assert options(settings(prompts=PROMPTS)).prompt == ""


@pytest.mark.parametrize("value", ["Query", "query: ", 1, True, None, ["query"]])
def test_unknown_prompt_refused_with_the_models_own(value: object) -> None:
    for default in (None, "document"):
        message = refused([b"x"], None, settings(prompts=PROMPTS, default_prompt=default), prompt=value)
        expected = f"parameter prompt is {value!r}; allowed: 'query', 'document' or 'empty'; '' for no prompt"
        assert message == expected


def test_prompt_refused_where_the_model_has_none() -> None:
    assert "the model has no prompts" in refused([b"x"], prompt="query")


def test_prompt_kept_out_of_the_limits_of_the_texts() -> None:
    own = settings(prompts={"long": "word " * 100}, default_prompt="long")
    assert isinstance(read([b"x" * 100], None, own), Question)


@pytest.mark.parametrize(("value", "kept"), [(1, 1), (2, 2), (3, None)])
def test_dimensions_taken_when_the_model_declares_them(value: int, kept: int | None) -> None:
    assert options(settings(dimensions=(1, 2)), dimensions=value).dimensions == kept


@pytest.mark.parametrize("value", [0, -1, 4, 10**9])
def test_other_dimensions_refused_with_those_allowed(value: int) -> None:
    message = refused([b"x"], None, settings(dimensions=(1, 2)), dimensions=value)
    assert message.startswith(f"parameter dimensions is {value}; allowed: 1, 2 or 3")
    assert "allowed: 3 (model.dimensions" in refused([b"x"], dimensions=value)


@pytest.mark.parametrize("value", ["none", "simple", "first", "average", "max"])
def test_aggregation_taken_for_tagging(value: str) -> None:
    assert options(settings("tagging"), aggregation=value).aggregation == value
    assert options(settings("tagging", aggregation=value)).aggregation == value


@pytest.mark.parametrize("value", ["NONE", "", 1, True, None, ["none"]])
def test_unknown_aggregation_refused_with_what_is_allowed(value: object) -> None:
    message = refused([b"x"], None, settings("tagging"), aggregation=value)
    assert message == (f"parameter aggregation is {value!r}; allowed: 'none', 'simple', 'first', 'average' or 'max'")


@pytest.mark.parametrize(
    ("name", "value", "task", "belongs"),
    [
        ("prompt", "query", "tagging", "embedding"),
        ("prompt", "", "classification", "embedding"),
        ("dimensions", 2, "reranking", "embedding"),
        ("aggregation", "first", "embedding", "tagging"),
        ("aggregation", "first", "answering", "tagging"),
    ],
)
def test_parameter_of_another_task_refused(name: str, value: object, task: str, belongs: str) -> None:
    message = refused([b"x"], None, settings(task, pair="optional", prompts=PROMPTS, dimensions=(2,)), **{name: value})
    assert message.startswith(f"parameter {name} is {value!r}; it is for models whose task is {belongs}")
    assert f"this model's task is {task}" in message


def test_value_cut_in_the_message_when_it_is_long() -> None:
    for name in ("truncate", "prompt"):
        assert len(refused([b"x"], **{name: "x" * 100_000})) < 300


# The level


def test_level_is_background_when_the_request_names_none() -> None:
    assert options().level == "background"


@pytest.mark.parametrize("level", ["interactive", "background"])
def test_level_read_from_the_parameter_class(level: str) -> None:
    assert options(**{"class": level}).level == level


@pytest.mark.parametrize("value", ["urgent", "", 1, True, None, ["interactive"]])
def test_request_refused_when_its_class_is_unknown(value: object) -> None:
    message = refused([b"x"], **{"class": value})
    assert message == f"parameter class is {value!r}; allowed: 'interactive' or 'background'"
