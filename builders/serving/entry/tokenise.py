"""Texts to token ids, a whole dynamic batch at a time; what is too long is handed to `cutting`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import EntryConfig
from .cutting import Cut, common_start, own_tokens, window_count, window_cuts
from .errors import Refusal
from .request import Options, Question


@dataclass(frozen=True, slots=True)
class Piece:
    """One row of a bucket model: a text or a pair, or a window of one.

    Attributes:
        ids: INT32 [length], special tokens included, at most the model's limit.
        segment_start: first token of the second segment; the number of tokens when there is none.
        lead: place in `ids` of the first own token: one of the text itself, or of the second text of a pair.
        start: place of that token among all own tokens of the text.
        own: number of own tokens.
    """

    ids: NDArray[np.int32]
    segment_start: int
    lead: int = 0
    start: int = 0
    own: int = 0


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the own tokens of a text come from; kept for tasks that answer with places in the text.

    Attributes:
        ids: token numbers, [own].
        tokens: the tokens as the vocabulary writes them, [own].
        offsets: first character and the one behind the last, of the text (with its prompt), [own].
        words: number of the word each belongs to, or None, [own].
    """

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    words: list[int | None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text, or one pair, as tokens.

    Attributes:
        pieces: one, or several windows of truncate=chunk.
        cut: tokens that no piece holds.
        spans: of the own tokens, also those that were cut; None when the task does not need them.
    """

    pieces: tuple[Piece, ...]
    cut: int
    spans: Spans | None = None

    @property
    def ids(self) -> NDArray[np.int32]:
        """INT32 [length] of the first piece, which is the only one unless the text was cut into windows."""
        return self.pieces[0].ids

    @property
    def used(self) -> int:
        """Tokens of all pieces, special tokens included."""
        return sum(piece.ids.size for piece in self.pieces)


class Tokeniser:
    """One tokeniser of one process; never shared between threads.

    Truncation and padding are off in the tokeniser itself: the exact number of cut tokens is part of the answer,
    and the bucket decides about padding. Nothing is set again later, so no call can see another one's settings.

    Args:
        path: a tokenizer.json; a padding or truncation fixed in it is switched off.
        max_tokens: longest text in tokens, special tokens included.
        threads: threads of the tokeniser; must be the first use of the library in the process, which reads it once.
        spans: keep where each token comes from; costs time.
        segment: pairs have two segments (token types).
        overlap: tokens that two windows share when a request does not say.
        max_windows: windows of one request at most.

    Raises:
        ValueError: the limit leaves no room for text, or the pair's token types are not zeros followed by ones.
    """

    def __init__(
        self,
        path: Path,
        max_tokens: int,
        threads: int = 1,
        *,
        spans: bool = False,
        segment: bool = False,
        overlap: int = 0,
        max_windows: int = 64,
    ):
        """See the class."""
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        # Imported here because the library reads both variables when it is first used.
        from tokenizers import Tokenizer

        self._path = path
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._max_tokens, self._spans, self._segment = max_tokens, spans, segment
        self._overlap, self._max_windows = overlap, max_windows
        self._prompts: dict[str, list[int]] = {}
        self._encode = self._tokenizer.encode_batch if spans else self._tokenizer.encode_batch_fast
        specials = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= specials:
            raise ValueError(f"max_tokens is {max_tokens}; limit: more than the {specials} special tokens of a text")
        if segment:
            self._check_segments()

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Tokens]:
        """Tokenise texts or pairs and cut the end of what is too long; one result per text, in order.

        Raises:
            ValueError: the first text of a pair leaves no room for the second.
        """
        (answer,) = self.read([Question(tuple(texts), None if pairs is None else tuple(pairs))])
        if isinstance(answer, Refusal):
            raise ValueError(answer.message)
        return answer

    def read(self, questions: Sequence[Question]) -> list[list[Tokens] | Refusal]:
        """Tokenise the texts of all questions at once.

        Returns:
            One result per question, in order: the tokens of its texts, or why it is refused.
        """
        encodings = iter(self._encode([item for question in questions for item in _items(question)]))
        return [self._read(question, [next(encodings) for _ in question.texts]) for question in questions]

    def join(self, tokens: list[str]) -> str:
        """Tokens as the vocabulary writes them, as readable text."""
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    @property
    def marks_subwords(self) -> bool:
        """The vocabulary writes a token that continues a word with a prefix (WordPiece's ##)."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    @property
    def unknown_id(self) -> int | None:
        """Number of the token that stands for what the vocabulary does not have."""
        token = getattr(self._tokenizer.model, "unk_token", None)
        number: int | None
        if token is not None:
            number = self._tokenizer.token_to_id(token)
        else:
            # Unigram models name it by number, which only the file says.
            number = json.loads(self._path.read_text(encoding="utf-8"))["model"].get("unk_id")
        return number

    def _read(self, question: Question, encodings: list[Any]) -> list[Tokens] | Refusal:
        options, pair = question.options, question.pairs is not None
        result: list[Tokens] = []
        windows = 0
        for index, encoding in enumerate(encodings):
            ids = encoding.ids
            if len(ids) <= self._max_tokens and not self._spans:
                piece = Piece(np.asarray(ids, dtype=np.int32), self._segment_start(encoding, pair, len(ids)))
                result.append(Tokens((piece,), 0))
                continue
            tokens = self._long(_Text(index, encoding, ids, pair), options, windows)
            if isinstance(tokens, Refusal):
                return tokens
            windows += len(tokens.pieces) if len(tokens.pieces) > 1 else 0
            result.append(tokens)
        return result

    def _long(self, text: _Text, options: Options, windows: int) -> Tokens | Refusal:
        """A text that is too long, or whose spans are wanted; `windows`: those of the texts before it."""
        ids, (begin, end) = text.ids, own_tokens(text.encoding.sequence_ids, int(text.pair))
        spans = _spans(text.encoding, begin, end) if self._spans else None
        over = len(ids) - self._max_tokens
        if over > 0 and options.truncate == "error":
            return Refusal(
                "invalid",
                f"{text.name} has {len(ids)} tokens; limit: {self._max_tokens}; shorten it, or send truncate='end' to "
                "have its end cut",
            )
        # The prompt says what the text is for, so that it stays where the start is cut and opens every window.
        lead = begin + (common_start(ids[begin:end], self._prompt(options.prompt)) if over > 0 else 0)
        total, room = end - lead, end - lead - over
        if over > 0 and room < 1:
            return self._no_room(text, len(ids) - total)
        if over <= 0:
            cuts = [Cut(0, total)]
        elif options.truncate == "chunk":
            overlap = options.overlap
            if overlap is None:
                # The model's own overlap may not fit beside a long first text.
                overlap = min(self._overlap, room // 2)
            elif overlap >= room:
                return Refusal(
                    "invalid",
                    f"parameter overlap is {overlap}; limit: less than the {room} tokens of {text.name} that a window "
                    "has room for; send a smaller overlap",
                )
            needed = windows + window_count(total, room, overlap)
            if needed > self._max_windows:
                return Refusal(
                    "invalid",
                    f"the request needs {needed} windows for its texts up to {text.name}; limit: {self._max_windows} a "
                    "request (entry.max_windows); send fewer or shorter texts, or a smaller overlap",
                )
            cuts = window_cuts(total, room, overlap)
        else:
            cuts = [Cut(over, total)] if options.truncate == "start" else [Cut(0, room)]
        pieces = tuple(self._piece(text, lead, end, cut) for cut in cuts)
        return Tokens(pieces, max(over, 0) if len(pieces) == 1 else 0, spans)

    def _piece(self, text: _Text, lead: int, end: int, cut: Cut) -> Piece:
        """The own tokens of a cut with everything that stands around them; the segments are found in the result."""

        def kept(whole: list[int]) -> list[int]:
            return whole[:lead] + whole[lead + cut.start : lead + cut.stop] + whole[end:]

        ids = kept(text.ids)
        boundary = len(ids)
        if text.pair and self._segment:
            types = kept(text.encoding.type_ids)
            boundary = types.index(1) if 1 in types else boundary
        return Piece(np.asarray(ids, dtype=np.int32), boundary, lead, cut.start, cut.stop - cut.start)

    def _segment_start(self, encoding: Any, pair: bool, length: int) -> int:
        if not (pair and self._segment):
            return length
        types = encoding.type_ids
        return types.index(1) if 1 in types else length

    def _prompt(self, prompt: str) -> list[int]:
        if prompt not in self._prompts:
            self._prompts[prompt] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return self._prompts[prompt]

    def _no_room(self, text: _Text, around: int) -> Refusal:
        if text.pair:
            return Refusal(
                "invalid",
                f"the first text of {text.name} has {around} tokens with the special tokens; limit: "
                f"{self._max_tokens - 1}, so that one of the second text has room; only the second text is cut; "
                "shorten the first",
            )
        return Refusal(
            "invalid",
            f"the prompt has {around} tokens with the special tokens; limit: {self._max_tokens - 1}, so that one of "
            f"{text.name} has room; send a shorter prompt's name or prompt=''",
        )

    def _check_segments(self) -> None:
        """See that one number tells a pair's token types, and take the slower call where the fast one drops them."""
        probe = [("a", "a")]
        (whole,), (fast,) = self._tokenizer.encode_batch(probe), self._tokenizer.encode_batch_fast(probe)
        if not set(whole.type_ids) <= {0, 1} or whole.type_ids != sorted(whole.type_ids):
            raise ValueError(
                f"the tokeniser gives a pair the token types {whole.type_ids}; limit: zeros, then ones; take a model "
                "with such token types"
            )
        if fast.type_ids != whole.type_ids:
            # Without a post-processor the fast call gives zeros alone (tokenizers 0.23).
            self._encode = self._tokenizer.encode_batch


def open_tokeniser(path: Path, config: EntryConfig) -> Tokeniser:
    """The tokeniser of a version, warmed up.

    Args:
        path: its tokenizer.json.
        config: its settings.

    Raises:
        ValueError: as `Tokeniser`.
    """
    tokenise = Tokeniser(
        path,
        config.max_tokens,
        config.tokenizer_threads,
        spans=config.per_token,
        segment=config.segment,
        overlap=config.overlap,
        max_windows=config.max_windows,
    )
    tokenise(["warm up"])
    return tokenise


@dataclass(frozen=True, slots=True)
class _Text:
    """One text or pair of a request, as the tokeniser read it."""

    index: int
    encoding: Any
    ids: list[int]
    pair: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"{'pair' if self.pair else 'text'} {self.index}"


def _items(question: Question) -> Iterator[str | tuple[str, str]]:
    """What the tokeniser gets for each text of a question."""
    if question.pairs is not None:
        yield from zip(question.texts, question.pairs, strict=True)
    elif question.options.prompt:
        yield from (question.options.prompt + text for text in question.texts)
    else:
        yield from question.texts


def _spans(encoding: Any, begin: int, end: int) -> Spans:
    return Spans(
        ids=encoding.ids[begin:end],
        tokens=encoding.tokens[begin:end],
        offsets=encoding.offsets[begin:end],
        words=encoding.word_ids[begin:end],
    )
