"""Token ids back into text.

OpenAI's embeddings take token ids; the entry takes text and tokenises it itself. Ids mean nothing without their
tokenizer, and those that clients send are often another's: langchain's OpenAIEmbeddings sends ids of OpenAI's own
cl100k_base. So the door reads ids only with the tokenizer.json it was given, and only if the text it finds has exactly
these ids again. Ids of a foreign tokenizer fail that, instead of becoming the embedding of nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from clients.door.problems import invalid
from clients.errors import InvalidInput

#: Ids of one text; no model reads as many.
MOST = 65_536


class TokenIds:
    """Reads ids of one tokenizer.

    Args:
        path: tokenizer.json: that of the model (it lies in each version of the entry), or of whatever tokenizer the
            clients use.

    Raises:
        InvalidInput: the file is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        """Loads it."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise InvalidInput("the tokenizer cannot be read", value=str(path), limit=str(error)) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._size = self._tokenizer.get_vocab_size()
        # What the tokenizer puts around every text, which the entry puts there again.
        self._around = frozenset(self._tokenizer.encode("").ids)

    def text(self, ids: Sequence[int], position: int) -> str:
        """The text of ids.

        Args:
            ids: with or without the special tokens at both ends.
            position: of the text in the request, for the message.

        Raises:
            Problem: 400, they are too many, an id is outside the vocabulary, or they are not what the tokenizer gives.
        """
        if len(ids) > MOST:
            raise invalid(f"text {position} has {len(ids)} token ids; limit: {MOST}; send text, or fewer", "input")
        wrong = next((one for one in ids if not 0 <= one < self._size), None)
        if wrong is not None:
            raise invalid(f"text {position} has token id {wrong}; limit: 0 to {self._size - 1}; {REMEDY}", "input")
        first, last = 0, len(ids)
        while first < last and ids[first] in self._around:
            first += 1
        while last > first and ids[last - 1] in self._around:
            last -= 1
        bare = list(ids[first:last])
        # Special tokens stay in the text ([UNK] among them), where the tokenizer finds them again.
        text = str(self._tokenizer.decode(bare, skip_special_tokens=False))
        if self._tokenizer.encode(text, add_special_tokens=False).ids != bare:
            raise invalid(f"text {position} has token ids that are not of the door's tokenizer; {REMEDY}", "input")
        return text


REMEDY = "send text (langchain's OpenAIEmbeddings: check_embedding_ctx_length=False)"
