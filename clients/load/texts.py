"""Texts of wanted lengths, drawn reproducibly from the user's own corpus or from what Python itself ships."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from clients.errors import InvalidInput

#: Tokens of a BERT word-piece vocabulary for a blank-separated word of Python's documentation (measured on MiniLM's).
TOKENS_PER_WORD = 1.7
DEFAULT_MIX = "60% 20, 20% 100, 15% 220, 5% 480"

_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s+([0-9]+)\s*")
_LONGEST_WORD = 40
#: Longest text that is made.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class Mix:
    """Shares of text lengths: `parts` holds (share of 1, tokens) pairs whose shares add up to 1."""

    parts: tuple[tuple[float, int], ...]

    @classmethod
    def parse(cls, spec: str) -> Mix:
        """Reads "60% 20, 20% 100, 15% 220, 5% 480": a share, then a length in tokens without special tokens.

        Raises:
            InvalidInput: another form, a length of 0, or shares that do not add up to 100 %.

        Example:
            >>> Mix.parse("75% 20, 25% 100").parts
            ((0.75, 20), (0.25, 100))
        """
        found = [_PART.fullmatch(part) for part in spec.split(",")]
        parts = tuple((float(match[1]) / 100, int(match[2])) for match in found if match)
        if len(parts) != len(found) or not parts or not all(1 <= tokens <= MOST_TOKENS for _, tokens in parts):
            limit = f"a form like '{DEFAULT_MIX}', at most {MOST_TOKENS} tokens"
            raise InvalidInput("the mix of lengths cannot be read", value=spec, limit=limit)
        total = sum(share for share, _ in parts)
        if abs(total - 1) > 1e-6:
            raise InvalidInput("the shares of the mix do not add up", value=f"{100 * total:g} %", limit="100 %")
        return cls(parts)

    def draw(self, chance: random.Random) -> int:
        """A wanted length in tokens: a part by its share, then within a fifth of its length either way."""
        at = chance.random()
        tokens = self.parts[-1][1]
        for share, size in self.parts:
            if at < share:
                tokens = size
                break
            at -= share
        return max(1, round(tokens * chance.uniform(0.8, 1.2)))


@dataclass(frozen=True)
class Text:
    """A text and its length: tokens, special ones included, or what `TextSource.exact` says."""

    text: str
    tokens: int


class TextSource:
    """Draws texts.

    Args:
        lines: the user's own texts; the built-in prose when left out.
        tokenizer: the model's `tokenizer.json`. Without it lengths are estimated from words, 1.7 tokens each.

    Attributes:
        exact: whether lengths were measured with the model's tokenizer.

    Raises:
        InvalidInput: no usable text, no such tokenizer file, or the package `tokenizers` is missing.
    """

    def __init__(self, lines: Sequence[str] | None = None, tokenizer: Path | None = None):
        """Reads the corpus once; see the class."""
        self.lines = None if lines is None else [line for line in lines if line.strip()]
        if self.lines == []:
            raise InvalidInput("the corpus holds no text", limit="at least one line that is not blank")
        self._tokenizer = None if tokenizer is None else _open_tokenizer(tokenizer)
        self.exact = self._tokenizer is not None
        self._words = _words(" ".join(self.lines) if self.lines is not None else _prose())
        # Tokens up to and without word i: a cut of any length is two look-ups.
        self._until = [0.0, *accumulate(self._word_lengths())]

    def cut(self, tokens: int, chance: random.Random) -> str:
        """Running words of the corpus, about `tokens` tokens of them (special tokens not counted), at least one."""
        most = self._until[-1]
        if tokens >= most:  # a corpus smaller than the text: its words over again
            times = int(tokens / most) + 1
            words = (self._words * times)[: max(1, round(len(self._words) * tokens / most))]
            return " ".join(words)
        first = min(bisect_left(self._until, chance.uniform(0, most - tokens)), len(self._words) - 1)
        last = bisect_left(self._until, self._until[first] + tokens)
        return " ".join(self._words[first : max(first + 1, last)])

    def draw(self, n: int, mix: Mix | None, chance: random.Random) -> list[Text]:
        """`n` texts: cut to the lengths of `mix`, or whole lines of the user's corpus when it is None.

        The built-in prose has no lines of its own and uses the default mix.
        """
        if mix is None and self.lines is not None:
            return self.measured([chance.choice(self.lines) for _ in range(n)])
        lengths = mix or Mix.parse(DEFAULT_MIX)
        return self.measured([self.cut(lengths.draw(chance), chance) for _ in range(n)])

    def measured(self, texts: list[str]) -> list[Text]:
        """The texts with their lengths."""
        if self._tokenizer is not None:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=True)
            return [Text(text, len(encoding.ids)) for text, encoding in zip(texts, encodings, strict=True)]
        return [Text(text, round(len(text.split()) * TOKENS_PER_WORD)) for text in texts]

    def _word_lengths(self) -> list[float]:
        if self._tokenizer is None:
            return [TOKENS_PER_WORD] * len(self._words)
        # Each different word once; its tokens alone are its tokens in a text, or nearly (SentencePiece).
        different = sorted(set(self._words))
        encodings = self._tokenizer.encode_batch_fast(different, add_special_tokens=False)
        lengths = {word: float(len(encoding.ids)) for word, encoding in zip(different, encodings, strict=True)}
        return [lengths[word] for word in self._words]


def read_corpus(path: Path) -> list[str]:
    """The lines of a UTF-8 file; a text may hold what only `str.splitlines` takes for the end of a line.

    Raises:
        InvalidInput: it cannot be read or is no UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        return lines if lines[-1] else lines[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("the corpus cannot be read", value=str(path), limit=str(error)) from None


def _words(text: str) -> list[str]:
    # Rules of tables ("=====") and the like are hundreds of tokens in one word, and no prose.
    words = [word for word in text.split() if len(word) <= _LONGEST_WORD and any(letter.isalnum() for letter in word)]
    if not words:
        raise InvalidInput("the corpus holds no word", limit=f"words of up to {_LONGEST_WORD} letters")
    return words


def _prose() -> str:
    from pydoc_data.topics import topics

    return " ".join(topics[name] for name in sorted(topics))


def _open_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidInput("the package tokenizers is missing", remedy="pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception
        raise InvalidInput("the tokenizer cannot be read", value=str(file), limit=str(error)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
