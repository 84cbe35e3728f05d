"""Texts as callers give them, as the bytes that travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.errors import InvalidInput

#: One text, a sequence of texts, or a numpy array of them (dtype U, S or object, shape [n] or [n, 1]).
Texts = str | Sequence[str] | npt.NDArray[Any]


def utf8(texts: object, name: str = "texts", first: int = 0) -> list[bytes]:
    """The texts as UTF-8, checked; names the first that is not one.

    Args:
        texts: a str (a list of one), an iterable of str, or a numpy array, whose items may be bytes too.
        name: what the caller calls them.
        first: position of the first of them in the call.

    Raises:
        InvalidInput: it is none of these, or an item is not text.
    """
    return [_encoded(text, index) for index, text in enumerate(_items(texts, name, first), first)]


def _items(texts: object, name: str, first: int) -> Iterator[object]:
    """The single texts; bytes only out of a numpy array, where they are what its dtype S gives."""
    if isinstance(texts, str):
        yield texts
    elif isinstance(texts, np.ndarray):
        if texts.dtype.kind not in "USO" or not (texts.ndim == 1 or (texts.ndim == 2 and texts.shape[1] == 1)):
            raise InvalidInput(
                f"{name} is an array {texts.dtype} {list(texts.shape)}",
                limit="strings, bytes or objects, shape [n] or [n, 1]",
            )
        for index, item in enumerate(texts.ravel().tolist(), first):
            yield _decoded(item, index) if isinstance(item, bytes) else item
    elif isinstance(texts, bytes | bytearray) or not isinstance(texts, Iterable):
        raise InvalidInput(f"{name} is of type {type(texts).__name__}", limit="a str or a sequence of str")
    else:
        yield from texts


def _decoded(item: bytes, index: int) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"not UTF-8 at byte {error.start}",
            value=item[error.start : error.start + 1],
            remedy="convert the bytes to UTF-8",
            texts=range(index, index + 1),
        ) from None


def _encoded(text: object, index: int) -> bytes:
    here = range(index, index + 1)
    if not isinstance(text, str):
        raise InvalidInput(f"not a str but {type(text).__name__}", value=text, texts=here)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"cannot be UTF-8: lone surrogate at character {error.start}",
            value=text[error.start],
            remedy="decode the text's bytes with errors='replace', or remove the character",
            texts=here,
        ) from None


def paired(first: Texts, second: Texts, names: tuple[str, str]) -> tuple[list[bytes], list[bytes]]:
    """Both sides of pairs; a single str on one side goes with every item of the other.

    Raises:
        InvalidInput: an item is not text, or the sides differ in length.
    """
    one, other = utf8(first, names[0]), utf8(second, names[1])
    if isinstance(first, str) and not isinstance(second, str):
        one = one * len(other)
    elif isinstance(second, str) and not isinstance(first, str):
        other = other * len(one)
    if len(one) != len(other):
        raise InvalidInput(
            f"{len(one)} {names[0]} and {len(other)} {names[1]} are no pairs",
            limit="as many of the one as of the other, or a single str on one side",
        )
    return one, other
