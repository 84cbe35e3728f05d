from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from builders.verify.bisect import bisect
from builders.verify.gate import GateReport
from builders.verify.metric import MetricReport
from builders.verify.parity import LINES, BlockParity, ParityReport
from builders.verify.report import BuildReport, ProfileRow, ReportError, StepRow, read_report, write_report

VOID = {"meta", "br", "link", "img", "hr"}


class Tags(HTMLParser):
    """Checks that tags close in order; keeps the text outside of style and SVG."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "svg"} & set(self.open):
            self.words.append(data)


def gate_report() -> GateReport:
    blocks = (
        BlockParity("embeddings.norm", 1.0, 1e-6, 1e-6, True, "bucket 16, batch 1, length 2", True),
        BlockParity("layer.0.attention.norm", 0.93, 0.2, 0.3, True, "bucket 16, batch 5, length 15", False),
        BlockParity("EMBEDDING", -1.0, None, None, False, "bucket 16, batch 5, length 0", False),
    )
    parity = ParityReport(LINES["fp16"], blocks, 14, ("pooled",), (), False)
    metric = MetricReport("retrieval recall@1", "<b>.csv", 1000, 0.986, 0.979, 0.0071, 9, 0.005, False)
    return GateReport("fp16", "full", parity, (metric,), False, (parity.summary(), "<script>"), 12.5, False)


def full() -> BuildReport:
    return BuildReport(
        model="all-MiniLM-L6-v2",
        model_sha256="ab" * 32,
        precision="fp16",
        date="2026-11-29T14:00:00+00:00",
        machine="2 cores, onnxruntime 1.32",
        version=3,
        steps=(
            StepRow("merged-qkv", 6, 6, 245, 221, 0.2),
            StepRow("gelu", 5, 6, 221, 221, 0.1, "one Gelu is split: Erf & Mul"),
            StepRow("fp16", None, None, 221, 260, 0.4),
        ),
        sizes={"export": 90_000_000, "fp16": 45_000_000},
        times={"export": 7.4, "fuse": 0.8, "verify": 31.0},
        operators={"MatMul": 36, "Add": 40},
        gate=gate_report(),
        bisect=bisect(["a", "gelu"], list, lambda steps: "gelu" not in steps),
        memory=(ProfileRow(128, 32, 300_000_000), ProfileRow(2048, 8, 900_000_000)),
    )


def bare() -> BuildReport:
    return BuildReport("m", "0" * 64, "fp32", "2026-11-29", "2 cores", missing={"memory": "TensorRT is not installed"})


def page_of(folder: Path, report: BuildReport) -> tuple[str, str]:
    _, html = write_report(folder, report)
    text = html.read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return text, " ".join(" ".join(parser.words).split())


def test_report_holds_every_figure_when_written_and_read(tmp_path: Path) -> None:
    report = full()
    json_file, html = write_report(tmp_path / "new", report)
    assert sorted(path.name for path in json_file.parent.iterdir()) == ["report.html", "report.json"]
    assert read_report(tmp_path / "new") == report
    document = json.loads(json_file.read_text(encoding="utf-8"))
    assert document["gate"]["parity"]["blocks"][1]["cosine"] == 0.93
    assert document["missing"] == {}
    assert html.stat().st_size < 400_000


def test_page_shows_every_section_when_there_is_data(tmp_path: Path) -> None:
    page, words = page_of(tmp_path, full())
    assert page.count("<svg") == 5
    for expected in (
        "all-MiniLM-L6-v2, fp16, version 3", "fails the accuracy gate", "one Gelu is split: Erf & Mul", "39.2 s in all",
        "layer.0.attention.norm", "not finite", "0.710 %", "at fault: gelu", "Not shown by the candidate: pooled",
    ):  # fmt: skip
        assert expected in words, expected
    assert "no data" not in words


def test_page_is_whole_in_itself_and_escaped_when_texts_hold_markup(tmp_path: Path) -> None:
    page, words = page_of(tmp_path, full())
    assert "<b>.csv" in words
    assert "<script" not in page
    fetched = [url for url in re.findall(r'(?:src|href)="([^"]+)"', page) if not url.startswith("#")]
    assert fetched == []


def test_sections_say_why_when_there_is_no_data(tmp_path: Path) -> None:
    page, words = page_of(tmp_path, bare())
    assert "<svg" not in page
    for expected in (
        "TensorRT is not installed", "no file was written", "no fusion or precision step", "not judged",
        "the accuracy gate was not run", "no step was timed",
    ):  # fmt: skip
        assert expected in words, expected
    missing = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["missing"]
    assert set(missing) == {"steps", "sizes", "times", "gate", "memory"}
    assert missing["memory"] == "TensorRT is not installed"


def test_page_is_equal_when_written_twice(tmp_path: Path) -> None:
    assert page_of(tmp_path / "a", full())[0] == page_of(tmp_path / "b", full())[0]


def test_refused_when_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no readable report.*report\.json"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"model": 1}', encoding="utf-8")
    with pytest.raises(ReportError, match="build again"):
        read_report(tmp_path)


def test_library_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    monkeypatch.delitem(__import__("sys").modules, "builders.verify.page", raising=False)
    with pytest.raises(ReportError, match="jinja2 is not installed"):
        write_report(tmp_path, bare())
