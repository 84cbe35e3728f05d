"""Texts that int8 learns its scales from: the user's own, or the docstrings of Python's standard library.

Never texts that the gate judges by: its built-in ones are Python's reference manual, TREC questions and verses.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from builders.errors import PrecisionError
from builders.int8 import Row
from builders.verify.data import LabelledTexts, TextPairs, first_words, is_prose, read_data

#: Texts that are run; more change the scales little.
TEXTS = 160
#: Sentences of one built-in text, taken in turn: most texts are short, some fill the longest bucket.
SENTENCES = (1, 1, 1, 2, 1, 3, 1, 6, 1, 20)
#: Packages of the standard library whose docstrings are prose in every version of Python.
_MODULES = (
    "configparser", "contextlib", "csv", "difflib", "doctest", "ftplib", "gzip", "heapq", "os", "pathlib", "pickle",
    "random", "shutil", "socket", "statistics", "string", "tempfile", "textwrap", "threading", "warnings",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """Texts, or pairs, with what the manifest keeps of them."""

    name: str
    """Where they are from."""
    texts: tuple[str, ...]
    """The texts; of pairs, the first ones."""
    seconds: tuple[str, ...] = ()
    """Of pairs, the second ones."""

    @property
    def sha256(self) -> str:
        """Hash of all texts: other texts make other scales, and so another version."""
        digest = hashlib.sha256()
        for text in (*self.texts, "", *self.seconds):
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": self.name, "texts": len(self.texts), "sha256": self.sha256}

    def rows(self, tokenise: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Row]:
        """The rows that the lanes would get.

        Args:
            tokenise: as the gate's (`builders.judge.rows_of`).
        """
        texts = list(zip(self.texts, self.seconds, strict=True)) if self.seconds else list(self.texts)
        return [Row(piece.ids, piece.segment_start) for piece in tokenise(texts)]


def calibration(path: Path | None = None, *, pairs: bool = False) -> Calibration:
    """The texts to calibrate with.

    Args:
        path: the user's file, of a form that `--data` takes; labels are not looked at.
        pairs: the model takes two texts.

    Raises:
        VerifyError: the file cannot be read as data.
        PrecisionError: it has no pairs and the model needs them.
    """
    if path is None:
        return (
            _paired(docstrings(), "docstrings of Python's standard library")
            if pairs
            else Calibration("docstrings of Python's standard library", docstrings())
        )
    data = read_data(path)
    if isinstance(data, TextPairs):
        taken = _taken(range(len(data.queries)))
        firsts, seconds = (tuple(part[n] for n in taken) for part in (data.queries, data.positives))
        # For a model of single texts, both sides are texts like those it will get.
        return Calibration(data.name, firsts, seconds) if pairs else Calibration(data.name, (*firsts, *seconds))
    if pairs:
        raise PrecisionError(
            "the calibration file has no pairs, and the model reads two texts",
            value="text, label" if isinstance(data, LabelledTexts) else "text",
            limit="columns query and positive",
            remedy="give pairs with --calibration, or leave it out",
        )
    return Calibration(data.name, tuple(data.texts[n] for n in _taken(range(len(data.texts)))))


def _taken(places: Sequence[int]) -> list[int]:
    """Evenly over all, at most `TEXTS`."""
    step = max(1.0, len(places) / TEXTS)
    return [places[int(n * step)] for n in range(min(TEXTS, len(places)))]


def _paired(texts: Sequence[str], name: str) -> Calibration:
    return Calibration(name, tuple(first_words(text) for text in texts), tuple(texts))


@lru_cache(maxsize=1)
def docstrings() -> tuple[str, ...]:
    """`TEXTS` texts of the standard library's docstrings, the same in every run on one version of Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sentences = [
        " ".join(block.split())
        for name in _MODULES
        for text in _docstrings_of(folder, name)
        for block in text.split("\n\n")
    ]
    prose = [text for text in dict.fromkeys(sentences) if is_prose(text)]
    # In an order that has nothing to do with what they are about, and is the same everywhere.
    prose.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    sizes = [SENTENCES[n % len(SENTENCES)] for n in range(TEXTS)]
    ends = list(accumulate(sizes))
    return tuple(" ".join(prose[end - size : end]) for size, end in zip(sizes, ends, strict=True) if end <= len(prose))


def _docstrings_of(folder: Path, name: str) -> Iterator[str]:
    path = folder / f"{name}.py"
    path = path if path.is_file() else folder / name / "__init__.py"
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text
