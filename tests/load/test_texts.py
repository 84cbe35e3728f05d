import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from builders.settings import load_settings
from builders.source import open_source
from clients import InvalidInput
from clients.load.texts import Mix, TextSource, read_corpus
from tests.tools.repositories import ROOT


@pytest.fixture(scope="module")
def tokenizer_folder() -> Path:
    return open_source(load_settings(ROOT / "deploy.cpu.yaml").model).folder


def test_a_mix_is_read_as_shares_and_lengths() -> None:
    assert Mix.parse("60% 20, 20% 100, 15% 220, 5% 480").parts == ((0.6, 20), (0.2, 100), (0.15, 220), (0.05, 480))


@pytest.mark.parametrize("spec", ["", "60 20", "60% 20", "100% 0", "100% 9999999", "60% 20, 50% 30", "100% 20,"])
def test_a_mix_that_cannot_be_meant_is_refused(spec: str) -> None:
    with pytest.raises(InvalidInput, match="mix"):
        Mix.parse(spec)


def test_lengths_come_in_the_shares_of_the_mix() -> None:
    chance, mix = random.Random(3), Mix.parse("75% 20, 25% 200")
    lengths = [mix.draw(chance) for _ in range(4000)]
    assert all(16 <= n <= 24 or 160 <= n <= 240 for n in lengths)
    assert 0.72 < sum(n < 100 for n in lengths) / len(lengths) < 0.78


def test_the_model_s_own_tokeniser_measures_the_texts(tokenizer_folder: Path) -> None:
    source = TextSource(tokenizer=tokenizer_folder)
    texts = source.draw(60, Mix.parse("50% 20, 50% 300"), random.Random(1))
    plain = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    assert source.exact
    assert [text.tokens for text in texts] == [len(plain.encode(text.text).ids) for text in texts]
    # Two special tokens, and at most the last word's tokens beyond what was wanted.
    assert all(16 <= text.tokens <= 50 or 240 <= text.tokens <= 390 for text in texts)


def test_without_a_tokeniser_lengths_are_estimated_from_words() -> None:
    source = TextSource()
    (text,) = source.draw(1, Mix.parse("100% 100"), random.Random(1))
    assert not source.exact
    assert text.tokens == round(1.7 * len(text.text.split()))
    assert 78 <= text.tokens <= 124


def test_equal_seeds_give_equal_texts() -> None:
    source = TextSource()
    first, again, other = (source.draw(5, None, random.Random(seed)) for seed in (4, 4, 5))
    assert first == again != other


def test_lines_of_an_own_corpus_are_sent_as_they_are_without_a_mix(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("eins zwei\n\ndrei 🚲\n", encoding="utf-8")
    texts = TextSource(read_corpus(path)).draw(20, None, random.Random(0))
    assert {text.text for text in texts} == {"eins zwei", "drei 🚲"}


def test_a_line_of_an_own_corpus_ends_where_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes("\ufeffone\u2028still one\r\n\x0ctwo".encode())
    assert read_corpus(path) == ["one\u2028still one", "\x0ctwo"]


def test_a_mix_cuts_an_own_corpus_even_one_smaller_than_the_text() -> None:
    source = TextSource(["one two three", "four five"])
    (long,) = source.draw(1, Mix.parse("100% 50"), random.Random(0))
    (short,) = source.draw(1, Mix.parse("100% 2"), random.Random(0))
    assert set(long.text.split()) == {"one", "two", "three", "four", "five"}
    assert 20 <= len(long.text.split()) <= 40
    assert short.text in {"one", "two", "three", "four", "five", "one two", "two three", "three four", "four five"}


def test_a_corpus_without_text_or_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no text"):
        TextSource(["", "  "])
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_corpus(tmp_path / "none.txt")
    with pytest.raises(InvalidInput, match="tokenizer cannot be read"):
        TextSource(tokenizer=tmp_path)
