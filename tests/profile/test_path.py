"""Shares of the request path from spans, and the spans' way through a file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from builders.errors import BuilderError
from builders.profile.kernels import Activity, covered, summarise
from builders.profile.path import Span, path_shares, read_spans
from builders.profile.timeline import draw_timeline
from builders.serving.spans import Spans


def entry(name: str, begin: float, end: float) -> Span:
    return Span("encode", 1, name, begin, end, 4)


def lane(name: str, begin: float, end: float, texts: int = 4) -> Span:
    return Span("encoder_128", 2, name, begin, end, texts)


def test_engine_idle_while_texts_are_prepared_is_told_as_a_share_of_the_wall_time() -> None:
    spans = [
        entry("decode", 0, 1), entry("tokenise", 1, 3), entry("lanes", 3, 9), entry("respond", 9, 10),
        lane("execute", 4, 8), entry("tokenise", 5, 8.5),
    ]  # fmt: skip
    found = path_shares(spans)
    assert found["seconds"] == 10
    assert found["engine_busy"] == pytest.approx(0.4)
    assert found["idle_while_preparing"] == pytest.approx((3 + 0.5) / 10), "what runs beside the engine costs nothing"
    assert found["entry"]["tokenise"] == pytest.approx(5.5 / 13.5)
    assert found["texts_a_batch"] == {"encoder_128": 4}
    assert path_shares([]) == {}


def test_spans_are_read_as_they_were_written_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    spans = Spans(str(tmp_path), "encoder_128")
    begin = spans.now()
    middle = spans.add("copy", begin, 3)
    spans.add("execute", middle, 3)
    spans.close()
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('["execute", 1.0')
    copy, execute = read_spans(tmp_path)
    assert (copy.model, copy.name, copy.texts, copy.begin) == ("encoder_128", "copy", 3, begin)
    assert copy.end == execute.begin == middle
    assert abs(execute.end - time.monotonic()) < 60


def test_nothing_is_written_when_spans_are_off(tmp_path: Path) -> None:
    spans = Spans("", "encode")
    assert spans.add("decode", spans.now()) == 0.0
    spans.close()
    assert not list(tmp_path.iterdir())


def test_timeline_is_a_picture(tmp_path: Path) -> None:
    path = draw_timeline([entry("tokenise", 0, 0.01), lane("execute", 0.01, 0.02)], tmp_path / "t.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_gaps_between_kernels_are_the_rest_of_the_span() -> None:
    batch = [
        Activity("copy", 0, 5, copy=True), Activity("product", 10, 40), Activity("norm", 30, 50),
        Activity("product", 70, 110), Activity("copy", 120, 130, copy=True),
    ]  # fmt: skip
    found = summarise([batch, batch, []])
    assert (found.batches, found.kernels, found.copies) == (2, 3, 2)
    assert found.gap_share == pytest.approx(20 / 100)
    assert (found.span_ms, found.busy_ms) == (pytest.approx(100e-6), pytest.approx(80e-6))
    assert found.largest[0] == ("product", pytest.approx(70 / 90))
    with pytest.raises(BuilderError, match="no kernel was recorded"):
        summarise([[Activity("copy", 0, 5, copy=True)]])


def test_union_counts_no_time_twice() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0
