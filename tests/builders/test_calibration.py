"""What int8 is calibrated with: real prose that the gate never judges by, or the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builders.calibration import TEXTS, calibration, docstrings
from builders.errors import PrecisionError
from builders.judge import calibration_of
from builders.tasks import TaskFacts
from builders.verify.data import builtin_texts


def pairs_file(folder: Path, count: int) -> Path:
    path = folder / "pairs.jsonl"
    lines = [json.dumps({"query": f"question {n}", "positive": f"the answer to {n}"}) for n in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_builtin_texts_short_and_long_and_none_of_the_gates() -> None:
    texts = docstrings()
    words = sorted(len(text.split()) for text in texts)
    assert len(texts) == TEXTS
    assert words[TEXTS // 2] < 40
    assert words[-1] > 300
    assert not set(texts) & set(builtin_texts().texts)


def test_pairs_made_of_the_builtin_texts_when_the_model_reads_two() -> None:
    found = calibration(pairs=True)
    assert found.seconds == docstrings()
    assert all(text.startswith(first.split()[0]) for first, text in zip(found.texts, found.seconds, strict=True))


def test_own_pairs_taken_evenly_as_pairs_or_as_single_texts(tmp_path: Path) -> None:
    path = pairs_file(tmp_path, 400)
    both, single = calibration(path, pairs=True), calibration(path)
    assert (len(both.texts), len(both.seconds)) == (TEXTS, TEXTS)
    assert (both.texts[0], both.texts[-1][:10]) == ("question 0", "question 3")
    assert (single.texts, single.seconds) == ((*both.texts, *both.seconds), ())
    assert both.facts["name"] == "pairs.jsonl"
    assert len({both.sha256, single.sha256, calibration().sha256}) == 3


def test_refused_when_pairs_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("text\n" + "\n".join(f"text {n}" for n in range(30)), encoding="utf-8")
    assert len(calibration(path).texts) == 30
    with pytest.raises(PrecisionError, match=r"has no pairs.*query and positive"):
        calibration(path, pairs=True)


def test_refused_when_nothing_would_read_the_file(tmp_path: Path, facts: TaskFacts) -> None:
    assert calibration_of("fp32", facts, None) is None
    with pytest.raises(PrecisionError, match="calibration texts without int8: 'fp32'"):
        calibration_of("fp32", facts, pairs_file(tmp_path, 20))


@pytest.fixture
def facts(minilm_source: object) -> TaskFacts:
    found: TaskFacts = minilm_source.task  # type: ignore[attr-defined]
    return found
