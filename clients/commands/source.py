"""Texts of a command: its arguments, a file, or stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.errors import EncoderError, InvalidInput


def given_texts(texts: list[str] | None, file: Path | None, stdin: bool, name: str = "TEXT") -> list[str]:
    """The texts of the one source that is named.

    Raises:
        InvalidInput: no source or several; the source cannot be read or is not UTF-8.
    """
    given = texts or []
    stdin = stdin or given == ["-"]
    if given == ["-"]:
        given = []
    if (bool(given), file is not None, stdin).count(True) != 1:
        raise InvalidInput("no single source of texts", limit=f"one of {name}..., --file FILE, --stdin (or -)")
    if stdin:
        return _lines(sys.stdin.buffer.read(), "stdin")
    if file is not None:
        try:
            return _lines(file.read_bytes(), str(file))
        except OSError as error:
            raise InvalidInput("the file cannot be read", value=str(file), limit=error.strerror) from None
    return given


def _lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 `data`; \\n or \\r\\n ends a line, a byte order mark is dropped."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{name}, line {number}: byte {error.start + 1} is not UTF-8",
                value=line[error.start : error.start + 1],
                remedy="convert the file to UTF-8, for example with iconv",
            ) from None
    return texts


@contextmanager
def lines_named(file: Path | None) -> Iterator[None]:
    """Adds the lines of the file to an error about texts of it."""
    try:
        yield
    except EncoderError as error:
        if file is not None and error.texts:
            first, last = error.texts[0] + 1, error.texts[-1] + 1
            error.add_note(f"{file}, line {first}" if first == last else f"{file}, line {first} to {last}")
        raise
