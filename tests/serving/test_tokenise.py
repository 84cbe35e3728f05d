"""Tokens and cuts, compared with the tokenizer's own truncation."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from builders.serving.entry.tokenise import Tokeniser

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


def test_16_tokenisers_on_16_threads_agree_with_one(minilm_tokenizer: Path, tokenise: Tokeniser) -> None:
    texts = [words(n) for n in range(2, 40)]
    wanted = [(text.ids.tolist(), text.cut) for text in tokenise(texts)]
    own = [Tokeniser(minilm_tokenizer, MAX) for _ in range(16)]
    got: list[object] = [None] * 16
    start = threading.Barrier(16)

    def work(number: int) -> None:
        start.wait(10)
        got[number] = [(text.ids.tolist(), text.cut) for _ in range(5) for text in own[number](texts)]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [wanted * 5] * 16
