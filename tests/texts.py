"""Real English texts of wanted lengths, from the Python documentation that ships with Python; nothing to download."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Content tokens of a BERT word-piece vocabulary for one blank-separated word of this text (measured on MiniLM's).
_TOKENS_PER_WORD = 1.7
# Share of the texts and their tokens, roughly what a search box and a document store send together.
_MIX = ((0.60, 20), (0.20, 100), (0.15, 220), (0.05, 480))


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    # Rules of tables ("=====") and the like are hundreds of tokens in one word, and no English.
    return tuple(word for word in words if any(letter.isalnum() for letter in word) and len(word) <= 40)


def real_texts(n: int, tokenizer: Tokenizer, lengths: tuple[int, int] = (1, 512), *, seed: int = 0) -> list[str]:
    """Make `n` texts whose content tokens (special tokens not counted) spread evenly over `lengths`, both ends met.

    The order is shuffled; equal arguments give equal texts. The tokenizer is not changed.
    """
    plain = type(tokenizer).from_str(tokenizer.to_str())
    plain.no_padding()
    plain.no_truncation()
    corpus = " ".join(_words())
    offsets = plain.encode(corpus, add_special_tokens=False).offsets
    starts = [i for i, (a, _) in enumerate(offsets) if a == 0 or corpus[a - 1] == " "]
    low, high = lengths
    chance = random.Random(seed)
    texts = []
    for i in range(n):
        wanted = round(low + (high - low) * i / max(1, n - 1))
        texts.append(_cut(plain, corpus, offsets, starts, wanted, chance))
    chance.shuffle(texts)
    return texts


def _cut(
    plain: Tokenizer,
    corpus: str,
    offsets: list[tuple[int, int]],
    starts: list[int],
    wanted: int,
    chance: random.Random,
) -> str:
    # A cut inside a word can tokenise otherwise than the whole word did: try another place then.
    for _ in range(200):
        first = chance.choice(starts)
        if first + wanted > len(offsets):
            continue
        text = corpus[offsets[first][0] : offsets[first + wanted - 1][1]]
        if len(plain.encode(text, add_special_tokens=False).ids) == wanted:
            return text
    raise ValueError(f"no text of {wanted} tokens found")


def mixed_texts(n: int, seed: int = 0) -> list[str]:
    """Make `n` texts in a realistic mix: 60 % about 20 tokens, 20 % about 100, 15 % about 220, 5 % about 480."""
    words, chance = _words(), random.Random(seed)
    texts = []
    for i in range(n):
        share, tokens = (i + 0.5) / n, _MIX[-1][1]
        for part, size in _MIX:
            if share < part:
                tokens = size
                break
            share -= part
        count = max(1, round(tokens * chance.uniform(0.8, 1.2) / _TOKENS_PER_WORD))
        first = chance.randrange(len(words) - count)
        texts.append(" ".join(words[first : first + count]))
    chance.shuffle(texts)
    return texts
