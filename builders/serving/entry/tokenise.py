"""Texts to token ids, a whole dynamic batch at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tokens:
    """One text as tokens.

    Attributes:
        ids: INT32 [length], special tokens included, at most the model's limit.
        cut: how many tokens were cut off its end.
    """

    ids: NDArray[np.int32]
    cut: int


class Tokeniser:
    """One tokeniser of one process; never shared between threads.

    Truncation and padding are off in the tokeniser itself: the exact number of cut tokens is part of the answer,
    and the bucket decides about padding.

    Args:
        path: a tokenizer.json; a padding or truncation fixed in it is switched off.
        max_tokens: longest text in tokens, special tokens included.
        threads: threads of the tokeniser; must be the first use of the library in the process, which reads it once.
    """

    def __init__(self, path: Path, max_tokens: int, threads: int = 1):
        """See the class."""
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        # Imported here because the library reads both variables when it is first used.
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._max_tokens = max_tokens
        specials = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= specials:
            raise ValueError(f"max_tokens is {max_tokens}; limit: more than the {specials} special tokens of a text")

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenise; one result per text, in order."""
        return [self._limit(encoding) for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def _limit(self, encoding: Any) -> Tokens:
        ids = encoding.ids
        over = len(ids) - self._max_tokens
        if over <= 0:
            return Tokens(np.asarray(ids, dtype=np.int32), 0)
        # The special tokens at the end stay; what is cut are the last tokens of the text itself.
        mask = encoding.special_tokens_mask
        end = len(ids)
        while mask[end - 1]:
            end -= 1
        return Tokens(np.asarray(ids[: end - over] + ids[end:], dtype=np.int32), over)
