"""Tokens and cuts, compared with the tokenizer's own truncation."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from builders.serving.entry.errors import Refusal
from builders.serving.entry.request import Options, Question
from builders.serving.entry.tokenise import Tokeniser, Tokens

CLS, SEP = 101, 102
MAX = 16


@pytest.fixture(scope="module")
def tokenise(minilm_tokenizer: Path) -> Tokeniser:
    return Tokeniser(minilm_tokenizer, MAX)


@pytest.fixture(scope="module")
def whole(minilm_tokenizer: Path) -> Tokenizer:
    """The library itself, nothing cut."""
    tokenizer = Tokenizer.from_file(str(minilm_tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def truncating(minilm_tokenizer: Path) -> Tokenizer:
    """The library itself, cutting at the same limit."""
    tokenizer = Tokenizer.from_file(str(minilm_tokenizer))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX)
    return tokenizer


def words(tokens: int) -> str:
    """A text of so many tokens, the two special ones included."""
    return " ".join(["word"] * (tokens - 2))


@pytest.mark.parametrize(("length", "cut"), [(MAX - 1, 0), (MAX, 0), (MAX + 1, 1), (MAX + 2, 2), (1000, 1000 - MAX)])
def test_counts_exact_around_the_limit(tokenise: Tokeniser, length: int, cut: int) -> None:
    (text,) = tokenise([words(length)])
    assert text.ids.size == min(length, MAX)
    assert text.cut == cut


@pytest.mark.parametrize("length", [2, 3, MAX - 1, MAX, MAX + 1, 500])
def test_special_tokens_kept_at_both_ends(tokenise: Tokeniser, length: int) -> None:
    (text,) = tokenise([words(length)])
    assert text.ids[0] == CLS
    assert text.ids[-1] == SEP
    assert (text.ids == SEP).sum() == 1
    assert text.ids.dtype.name == "int32"


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\u200b"])
def test_empty_text_is_the_special_tokens_alone(tokenise: Tokeniser, text: str) -> None:
    (tokens,) = tokenise([text])
    assert (tokens.ids.tolist(), tokens.cut) == ([CLS, SEP], 0)


def test_no_texts_give_no_tokens(tokenise: Tokeniser) -> None:
    assert tokenise([]) == []


def test_baked_in_padding_and_truncation_switched_off(minilm_tokenizer: Path) -> None:
    published = Tokenizer.from_file(str(minilm_tokenizer))
    assert published.padding, "the file pads no more: take another one for this test"
    assert published.truncation["max_length"] < 300
    short, long = Tokeniser(minilm_tokenizer, 512)(["word", words(300)])
    assert (short.ids.size, long.ids.size, long.cut) == (3, 300, 0)


def test_order_kept_when_lengths_are_mixed(tokenise: Tokeniser, whole: Tokenizer) -> None:
    texts = [words(n) for n in (30, 3, 17, 2, 16, 9)] + ["Grüße, 世界 \U0001f600"]
    got = tokenise(texts)
    assert [text.ids.size + text.cut for text in got] == [len(whole.encode(text).ids) for text in texts]
    assert got[-1].ids.tolist() == whole.encode(texts[-1]).ids


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=120), min_size=1, max_size=4))
@example(["[SEP] " * 40, "word " * 40 + "[SEP] [SEP]", "[CLS] " * 20, "[PAD] " * 20])
@example(["a\0b" * 20, "word " * 13, "word " * 14, "word " * 15, "x" * 150])
def test_ids_and_cut_equal_the_tokenizers_own_truncation(
    tokenise: Tokeniser, whole: Tokenizer, truncating: Tokenizer, texts: list[str]
) -> None:
    got = tokenise(texts)
    assert len(got) == len(texts)
    for text, tokens in zip(texts, got, strict=True):
        own = truncating.encode(text)
        assert tokens.ids.tolist() == own.ids
        assert tokens.cut == len(whole.encode(text).ids) - len(own.ids)


def test_ids_and_cut_equal_the_tokenizers_own_at_512(minilm_tokenizer: Path) -> None:
    truncating = Tokenizer.from_file(str(minilm_tokenizer))
    truncating.no_padding()
    truncating.enable_truncation(512)
    texts = [words(n) for n in (511, 512, 513, 3000)]
    got = Tokeniser(minilm_tokenizer, 512)(texts)
    assert [text.ids.tolist() for text in got] == [encoding.ids for encoding in truncating.encode_batch(texts)]
    assert [text.cut for text in got] == [0, 0, 1, 3000 - 512]


def small_tokenizer(folder: Path, template: str | None) -> Path:
    """A word-level tokenizer, w0 … w9 are 10 … 19; <s> is 1, </s> is 2."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": 10 + n for n in range(10)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        ("<s> $A </s>", [1, 10, 11, 12, 2]),
        ("<s> $A </s> </s>", [1, 10, 11, 2, 2]),
        ("$A </s>", [10, 11, 12, 13, 2]),
        ("<s> $A", [1, 10, 11, 12, 13]),
        (None, [10, 11, 12, 13, 14]),
    ],
)
def test_only_the_texts_own_tokens_cut_whatever_the_special_tokens(
    tmp_path: Path, template: str | None, ids: list[int]
) -> None:
    (text,) = Tokeniser(small_tokenizer(tmp_path, template), 5)(["w0 w1 w2 w3 w4 w5 w6 w7"])
    specials = template.count("s>") if template else 0
    assert text.ids.tolist() == ids
    assert text.cut == 8 + specials - 5


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_limit_without_room_for_text_refused_with_both_numbers(minilm_tokenizer: Path, limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens is {limit}; limit: more than the 2 special tokens"):
        Tokeniser(minilm_tokenizer, limit)


def test_one_token_of_text_kept_at_the_smallest_limit(minilm_tokenizer: Path) -> None:
    (text,) = Tokeniser(minilm_tokenizer, 3)(["word word word"])
    assert (text.ids.size, text.ids[0], text.ids[-1], text.cut) == (3, CLS, SEP, 2)


# Cutting, each way, compared with the library's own truncation


def library(path: Path, limit: int, **options: Any) -> Tokenizer:
    """The library itself, cutting at a limit."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(limit, **options)
    return tokenizer


def read(tokenise: Tokeniser, *texts: str, pairs: tuple[str, ...] | None = None, **options: Any) -> list[Tokens]:
    """Tokens of a request that must not be refused."""
    (answer,) = tokenise.read([Question(texts, pairs, Options(**options))])
    assert not isinstance(answer, Refusal), answer
    return answer


def refused(tokenise: Tokeniser, *texts: str, pairs: tuple[str, ...] | None = None, **options: Any) -> str:
    (answer,) = tokenise.read([Question(texts, pairs, Options(**options))])
    assert isinstance(answer, Refusal)
    assert answer.kind == "invalid"
    return answer.message


AROUND = [MAX - 1, MAX, MAX + 1, MAX + 2, 1000]
#: Texts that have broken tokenisers; a lone surrogate cannot come, since it is no UTF-8.
TORTURE = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 40,
    "שלום עולם مرحبا بالعالم " * 20,
    "\u202eright to left\u202c " * 20,
    "a\0b\0" * 50,
    "\n" * 100_000,
    "word\n" * 2000,
    "x" * 5000,
    "e\u0301\u0301\u0301" * 60,
    "\ufeff\u200b\u200d" * 50,
    "中文分词没有空格" * 20,
    "[SEP] [CLS] [PAD] [MASK] [UNK] " * 20,
    "##ing ##ed " * 30,
    "Ǆ ﬁ Å İ ẞ ㎏ ½ " * 20,
]


@pytest.fixture(scope="module")
def segmented(minilm_tokenizer: Path) -> Tokeniser:
    return Tokeniser(minilm_tokenizer, MAX, segment=True, overlap=4)


@pytest.mark.parametrize("length", AROUND)
def test_start_cut_like_the_library_around_the_limit(minilm_tokenizer: Path, tokenise: Tokeniser, length: int) -> None:
    text = " ".join(f"{number}" for number in range(length - 2))
    (tokens,) = read(tokenise, text, truncate="start")
    own = library(minilm_tokenizer, MAX, direction="left").encode(text)
    assert tokens.ids.tolist() == own.ids
    assert tokens.ids[[0, -1]].tolist() == [CLS, SEP]
    assert tokens.cut == sum(len(part.ids) - 2 for part in own.overflowing) if length > MAX else tokens.cut == 0


@pytest.mark.parametrize("truncate", ["end", "start"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=120), min_size=1, max_size=3))
@example(texts=["[SEP] " * 40, "word " * 40 + "[SEP] [SEP]", "a\0b" * 20])
def test_kept_part_contiguous_and_cut_exact(
    tokenise: Tokeniser, whole: Tokenizer, truncate: str, texts: list[str]
) -> None:
    for text, tokens in zip(texts, read(tokenise, *texts, truncate=truncate), strict=True):
        own = whole.encode(text).ids[1:-1]
        kept = tokens.ids[1:-1].tolist()
        assert tokens.ids[[0, -1]].tolist() == [CLS, SEP]
        assert tokens.cut == len(own) - len(kept)
        assert kept == (own[: len(kept)] if truncate == "end" else own[len(own) - len(kept) :])
        assert tokens.cut == 0 or tokens.ids.size == MAX
        assert tokens.used == tokens.ids.size


@pytest.mark.parametrize("length", AROUND)
def test_error_refuses_only_what_is_over_the_limit(tokenise: Tokeniser, length: int) -> None:
    if length <= MAX:
        assert read(tokenise, "a", words(length), truncate="error")[1].ids.size == length
        return
    message = refused(tokenise, "a", words(length), truncate="error")
    assert message.startswith(f"text 1 has {length} tokens; limit: {MAX}; shorten it")


@pytest.mark.parametrize("overlap", [0, 1, 5, MAX - 3])
@pytest.mark.parametrize("length", [2, *AROUND[:4], 2 * MAX, 60])
def test_windows_equal_the_librarys_own(minilm_tokenizer: Path, tokenise: Tokeniser, length: int, overlap: int) -> None:
    text = " ".join(f"{number}" for number in range(length - 2))
    (tokens,) = read(tokenise, text, truncate="chunk", overlap=overlap)
    own = library(minilm_tokenizer, MAX, stride=overlap).encode(text)
    assert [piece.ids.tolist() for piece in tokens.pieces] == [own.ids, *(part.ids for part in own.overflowing)]
    assert tokens.cut == 0
    assert tokens.used == sum(piece.ids.size for piece in tokens.pieces)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=300), overlap=st.integers(0, MAX - 3))
def test_windows_hold_every_token_and_know_their_place(
    tokenise: Tokeniser, whole: Tokenizer, text: str, overlap: int
) -> None:
    (tokens,) = read(tokenise, text, truncate="chunk", overlap=overlap)
    own = whole.encode(text).ids[1:-1]
    seen: set[int] = set()
    for piece in tokens.pieces:
        if len(tokens.pieces) == 1:
            assert piece.ids[1:-1].tolist() == own
            return
        assert piece.ids[piece.lead : piece.lead + piece.own].tolist() == own[piece.start : piece.start + piece.own]
        seen |= set(range(piece.start, piece.start + piece.own))
    assert seen == set(range(len(own)))


def test_models_own_overlap_taken_when_the_request_does_not_say(segmented: Tokeniser) -> None:
    (tokens,) = read(segmented, words(100), truncate="chunk")
    assert [piece.start for piece in tokens.pieces] == list(range(0, 98 - 4, MAX - 2 - 4))


def test_overlap_without_room_refused_with_both_numbers(tokenise: Tokeniser) -> None:
    message = refused(tokenise, words(100), truncate="chunk", overlap=MAX - 2)
    assert message.startswith(f"parameter overlap is {MAX - 2}; limit: less than the {MAX - 2} tokens of text 0")
    # What is not cut needs no overlap.
    assert len(read(tokenise, words(MAX), truncate="chunk", overlap=MAX - 2)) == 1


@pytest.mark.parametrize("spans", [False, True])
def test_more_windows_than_allowed_refused_and_texts_that_fit_not_counted(minilm_tokenizer: Path, spans: bool) -> None:
    tokenise = Tokeniser(minilm_tokenizer, MAX, spans=spans, max_windows=4)
    two, short = words(2 * MAX - 2), words(5)
    assert len(read(tokenise, *[short] * 9, two, two, truncate="chunk", overlap=0)) == 11
    message = refused(tokenise, two, two, short, two, truncate="chunk", overlap=0)
    assert message.startswith("the request needs 6 windows for its texts up to text 3; limit: 4 a request")
    assert "needs 1000 windows" in refused(tokenise, words(1000 + MAX - 1), truncate="chunk", overlap=MAX - 3)


def test_one_refused_request_leaves_the_others_their_own_tokens(tokenise: Tokeniser) -> None:
    asked = [
        Question((words(5), words(9))),
        Question((words(3), words(90)), options=Options(truncate="error")),
        Question((words(40),), options=Options(truncate="chunk", overlap=0)),
        Question(()),
        Question((words(7),)),
    ]
    answers = tokenise.read(asked)
    assert isinstance(answers[1], Refusal)
    sizes = [[text.ids.size for text in own] for own in answers if not isinstance(own, Refusal)]
    assert sizes == [[5, 9], [MAX], [], [7]]


@pytest.mark.parametrize("truncate", ["end", "start", "chunk"])
def test_torture_texts_tokenised_within_the_limit(minilm_tokenizer: Path, truncate: str) -> None:
    tokenise = Tokeniser(minilm_tokenizer, MAX, spans=True, max_windows=1_000_000)
    for text, tokens in zip(TORTURE, read(tokenise, *TORTURE, truncate=truncate), strict=True):
        assert all(2 <= piece.ids.size <= MAX for piece in tokens.pieces)
        assert all(piece.ids[[0, -1]].tolist() == [CLS, SEP] for piece in tokens.pieces)
        assert tokens.spans
        assert all(0 <= start <= end <= len(text) for start, end in tokens.spans.offsets)


# Prompts


def test_prompt_put_before_each_text_as_sentence_transformers_does(tokenise: Tokeniser, whole: Tokenizer) -> None:
    texts = ["moon", "", "far away"]
    got = read(tokenise, *texts, prompt="query: ")
    assert [text.ids.tolist() for text in got] == [whole.encode("query: " + text).ids for text in texts]


@pytest.mark.parametrize("truncate", ["end", "start", "chunk"])
def test_prompt_stays_in_every_piece_when_the_text_is_cut(tokenise: Tokeniser, whole: Tokenizer, truncate: str) -> None:
    (tokens,) = read(tokenise, words(60), prompt="query: ", truncate=truncate)
    prompt = whole.encode("query:").ids[1:-1]
    assert [piece.ids[1 : 1 + len(prompt)].tolist() for piece in tokens.pieces] == [prompt] * len(tokens.pieces)
    assert [piece.own for piece in tokens.pieces[:-1]] == [MAX - 2 - len(prompt)] * (len(tokens.pieces) - 1)
    assert tokens.cut == (0 if truncate == "chunk" else 60 + len(prompt) - MAX)


def test_prompt_without_room_for_text_refused(tokenise: Tokeniser) -> None:
    message = refused(tokenise, "a b c", prompt="word " * (MAX - 2))
    assert message.startswith(f"the prompt has {MAX} tokens with the special tokens; limit: {MAX - 1}")
    assert read(tokenise, "a b c", prompt="word " * (MAX - 3))[0].cut == 2


# Pairs


@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("second", [0, 1, 7, 8, 9, 200])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_pair_cut_in_its_second_text_alone_like_the_library(
    minilm_tokenizer: Path, segmented: Tokeniser, first: int, second: int, truncate: str
) -> None:
    one, two = " ".join(["first"] * first), " ".join(str(number) for number in range(second))
    (tokens,) = read(segmented, one, pairs=(two,), truncate=truncate)
    direction = "right" if truncate == "end" else "left"
    own = library(minilm_tokenizer, MAX, strategy="only_second", direction=direction).encode(one, two)
    assert tokens.ids.tolist() == own.ids
    types = (np.arange(tokens.ids.size) >= tokens.pieces[0].segment_start).astype(int)
    assert types.tolist() == own.type_ids, "the segments of what was kept"
    assert tokens.cut == max(0, first + second + 3 - MAX)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_pair_around_the_limit(segmented: Tokeniser, extra: int) -> None:
    room = MAX - 3 - 4
    (tokens,) = read(segmented, "a b c d", pairs=("word " * (room + extra),))
    assert (tokens.ids.size, tokens.cut) == (MAX + min(extra, 0), max(extra, 0))
    question = Question(("a b c d",), ("word " * (room + extra),), Options(truncate="error"))
    (answer,) = segmented.read([question])
    assert isinstance(answer, Refusal) == (extra > 0)
    if isinstance(answer, Refusal):
        assert answer.message.startswith(f"pair 0 has {MAX + 1} tokens; limit: {MAX}")


@pytest.mark.parametrize("overlap", [0, 1, 5])
def test_windows_of_a_pair_keep_the_first_text_and_its_segments(
    minilm_tokenizer: Path, segmented: Tokeniser, overlap: int
) -> None:
    one, two = "a b c", " ".join(str(number) for number in range(40))
    (tokens,) = read(segmented, one, pairs=(two,), truncate="chunk", overlap=overlap)
    own = library(minilm_tokenizer, MAX, strategy="only_second", stride=overlap).encode(one, two)
    parts = [own, *own.overflowing]
    assert [piece.ids.tolist() for piece in tokens.pieces] == [part.ids for part in parts]
    assert [piece.segment_start for piece in tokens.pieces] == [part.type_ids.index(1) for part in parts]
    assert {piece.segment_start for piece in tokens.pieces} == {5}


@pytest.mark.parametrize("truncate", ["end", "start", "chunk"])
@pytest.mark.parametrize("first", [MAX - 4, MAX - 3, MAX - 2, 500])
def test_pair_refused_with_both_numbers_when_the_first_text_alone_does_not_fit(
    segmented: Tokeniser, first: int, truncate: str
) -> None:
    texts, pairs = ("word " * first,), ("a b c",)
    if first <= MAX - 4:
        assert read(segmented, *texts, pairs=pairs, truncate=truncate)[0].pieces[0].own == 1
        return
    message = refused(segmented, *texts, pairs=pairs, truncate=truncate)
    assert message.startswith(
        f"the first text of pair 0 has {first + 3} tokens with the special tokens; limit: {MAX - 1}"
    )


def test_default_overlap_shrinks_beside_a_long_first_text(segmented: Tokeniser) -> None:
    (tokens,) = read(segmented, "word " * (MAX - 3 - 2), pairs=("a b c d e",), truncate="chunk")
    assert [(piece.start, piece.own) for piece in tokens.pieces] == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_single_text_has_one_segment(segmented: Tokeniser) -> None:
    for text in ("", "a b c", words(100)):
        piece = read(segmented, text)[0].pieces[0]
        assert piece.segment_start == piece.ids.size


def test_no_segments_when_the_model_has_none(tokenise: Tokeniser) -> None:
    for second in ("b", "word " * 50):
        piece = read(tokenise, "a", pairs=(second,))[0].pieces[0]
        assert piece.segment_start == piece.ids.size


def test_call_raises_what_a_pair_would_be_refused_for(tokenise: Tokeniser) -> None:
    assert [text.ids.size for text in tokenise(["a"], ["b"])] == [5]
    with pytest.raises(ValueError, match=f"the first text of pair 0 has 33 tokens .* limit: {MAX - 1}"):
        tokenise(["word " * 30], ["a"])


PAIRED = {
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
    "template": processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> <s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    ),
    # The second segment begins behind what is cut.
    "late": processors.TemplateProcessing(
        single="$A </s>", pair="$A <s> $B </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    ),
    "none": None,
}


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("truncate", ["end", "start", "chunk"])
def test_pairs_cut_like_the_library_whatever_the_post_processor(tmp_path: Path, name: str, truncate: str) -> None:
    path = small_tokenizer(tmp_path, None)
    whole = Tokenizer.from_file(str(path))
    if PAIRED[name] is not None:
        whole.post_processor = PAIRED[name]
    whole.save(str(path))
    one, two = "w0 w1", " ".join(f"w{number % 10}" for number in range(23))
    direction, stride = "left" if truncate == "start" else "right", 2 if truncate == "chunk" else 0
    (tokens,) = read(Tokeniser(path, 10, segment=True, overlap=2), one, pairs=(two,), truncate=truncate)
    own = library(path, 10, strategy="only_second", direction=direction, stride=stride).encode(one, two)
    parts = [own, *(own.overflowing if truncate == "chunk" else [])]
    assert [piece.ids.tolist() for piece in tokens.pieces] == [part.ids for part in parts]
    for piece in tokens.pieces:
        kept = " ".join(whole.id_to_token(number) for number in piece.ids[piece.lead : piece.lead + piece.own].tolist())
        # Of the part alone: the library gives its overflowing parts the types that its template would not (0.23).
        types = whole.encode(one, kept).type_ids
        assert (np.arange(piece.ids.size) >= piece.segment_start).astype(int).tolist() == types


def test_token_types_that_one_number_cannot_tell_refused(tmp_path: Path) -> None:
    path = small_tokenizer(tmp_path, None)
    odd = Tokenizer.from_file(str(path))
    odd.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A:1 </s>:1 $B:0", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    odd.save(str(path))
    with pytest.raises(ValueError, match=r"token types \[1, 1, 0\]; limit: zeros, then ones"):
        Tokeniser(path, 10, segment=True)
    Tokeniser(path, 10)


# What the tasks ask


def test_spans_tell_where_each_own_token_comes_from(minilm_tokenizer: Path) -> None:
    tokenise = Tokeniser(minilm_tokenizer, MAX, spans=True)
    text = "Unbelievable 🚲 naïve!"
    (tokens,) = read(tokenise, text)
    assert tokens.spans
    assert [text[start:end] for start, end in tokens.spans.offsets] == ["Unbelievable", "🚲", "naïve", "!"]
    assert tokens.spans.tokens == ["unbelievable", "[UNK]", "naive", "!"]
    assert tokens.spans.words == [0, 1, 2, 3]
    assert tokens.ids[1:-1].tolist() == tokens.spans.ids
    assert tokens.spans.ids[1] == tokenise.unknown_id
    assert tokenise.marks_subwords
    assert tokenise.join(["un", "##bel", "##iev"]) == "unbeliev"


def test_spans_of_a_pair_are_those_of_its_second_text(minilm_tokenizer: Path) -> None:
    tokenise = Tokeniser(minilm_tokenizer, MAX, spans=True)
    (tokens,) = read(tokenise, "who is there", pairs=("the moon",))
    assert tokens.spans
    assert tokens.spans.tokens == ["the", "moon"]
    assert tokens.spans.offsets == [(0, 3), (4, 8)]
    assert (tokens.pieces[0].lead, tokens.pieces[0].own) == (5, 2)
    (empty,) = read(tokenise, "who is there", pairs=("",))
    assert empty.spans
    assert (empty.spans.tokens, empty.pieces[0].own) == ([], 0)


def test_spans_of_a_cut_text_hold_what_was_cut_too(minilm_tokenizer: Path) -> None:
    tokenise = Tokeniser(minilm_tokenizer, MAX, spans=True)
    for truncate, start in (("end", 0), ("start", 100 - MAX)):
        (tokens,) = read(tokenise, words(100), truncate=truncate)
        assert tokens.spans
        assert len(tokens.spans.ids) == 98
        assert (tokens.pieces[0].start, tokens.pieces[0].own, tokens.cut) == (start, MAX - 2, 100 - MAX)


def test_vocabularies_without_prefix_or_unknown_token_told_apart(tmp_path: Path) -> None:
    tokenise = Tokeniser(small_tokenizer(tmp_path, None), 5)
    assert not tokenise.marks_subwords
    assert tokenise.unknown_id == 0
    assert tokenise.join(["w0", "w1"]) == "w0 w1"
    path = tmp_path / "unigram.json"
    Tokenizer(models.Unigram([("<s>", 0.0), ("<unk>", 0.0), ("a", -1.0)], unk_id=1)).save(str(path))
    assert Tokeniser(path, 5).unknown_id == 1
    Tokenizer(models.BPE({"a": 0}, [])).save(str(path))
    assert Tokeniser(path, 5).unknown_id is None


def outcome(answer: list[Tokens] | Refusal) -> object:
    """Something that can be compared."""
    if isinstance(answer, Refusal):
        return answer
    return [([piece.ids.tolist() for piece in text.pieces], text.cut) for text in answer]


def test_16_tokenisers_on_16_threads_agree_with_one(minilm_tokenizer: Path, tokenise: Tokeniser) -> None:
    texts = [words(n) for n in range(2, 40, 3)]
    asked = [
        Question(tuple(texts), None if pair is None else (pair,) * len(texts), Options(truncate=truncate))
        for truncate in ("end", "start", "error", "chunk")
        for pair in (None, words(30))
    ]
    wanted = [outcome(answer) for answer in tokenise.read(asked)]
    own = [Tokeniser(minilm_tokenizer, MAX) for _ in range(16)]
    got: list[object] = [None] * 16
    start = threading.Barrier(16)

    def work(number: int) -> None:
        start.wait(10)
        # Another order on every thread: no call may see another one's way of cutting.
        order = asked[number % 8 :] + asked[: number % 8]
        answers = [[outcome(answer) for answer in own[number].read(order)] for _ in range(2)]
        got[number] = [answer[8 - number % 8 :] + answer[: 8 - number % 8] for answer in answers]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [[wanted] * 2] * 16
