from __future__ import annotations

import json
from dataclasses import replace

import onnx_ir
import pytest

from builders.verify.data import LabelledTexts, builtin_texts, shortened
from builders.verify.gate import Gate, GateError, GateReport, GateSettings, require, run_gate
from builders.verify.runner import VerifyError
from tests.verify.graphs import edited, remake_scale, round_fp16, runner, swap_q_and_k, widen_mask


def labelled() -> LabelledTexts:
    """Sentences told apart by a word that the others lack: even random weights see it."""
    texts = builtin_texts().texts[:200]
    marked = tuple(f"{'zebra zebra' if n % 2 else 'Python code'} {text[:30]}" for n, text in enumerate(texts))
    return LabelledTexts("marked", marked, tuple("ab"[n % 2] for n in range(len(marked))))


@pytest.fixture(scope="module")
def judged(settings: GateSettings) -> GateSettings:
    return replace(settings, datasets=(labelled(), shortened(builtin_texts(), 1000)))


@pytest.fixture(scope="module")
def full_gate(tiny: onnx_ir.Model, blocks: dict[str, str], judged: GateSettings) -> Gate:
    return Gate(runner(tiny, blocks), judged)


def test_report_holds_every_figure_when_written_as_json_and_read(
    full_gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]
) -> None:
    for edits, precision in (((remake_scale,), "fp32"), ((widen_mask, round_fp16), "fp16")):
        report = full_gate.run(runner(edited(tiny, *edits), blocks), precision)
        text = json.dumps(report.to_json(), allow_nan=False)
        assert GateReport.from_json(json.loads(text)) == report


def test_healthy_candidate_passes_every_part(full_gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    report = require(full_gate.run(runner(edited(tiny, round_fp16), blocks), "fp16"), "fp16")
    assert (report.passed, report.finite, report.reasons) == (True, True, ())
    assert [metric.task for metric in report.metrics] == ["classification accuracy", "top-1 neighbour agreement"]
    assert report.metrics[0].reference > 0.9


def test_metric_fails_too_when_q_and_k_are_swapped(
    full_gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]
) -> None:
    candidate = runner(edited(tiny, swap_q_and_k), blocks)
    report = full_gate.run(candidate, "fp32")
    assert any("top-1 neighbour agreement" in reason for reason in report.reasons)
    with pytest.raises(GateError, match=r"build 7 fails the accuracy gate.*layer\.1\.attention") as caught:
        require(report, "build 7")
    assert caught.value.report is report


def test_step_is_named_when_it_breaks_the_graph(gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    report = gate.check_step("scale", runner(edited(tiny, remake_scale), blocks))
    assert (report.scope, report.metrics, report.passed) == ("step", (), True)
    with pytest.raises(GateError, match="step merged-qkv fails"):
        gate.check_step("merged-qkv", runner(edited(tiny, swap_q_and_k), blocks))


def test_output_alone_is_judged_when_the_candidate_shows_no_blocks(
    gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]
) -> None:
    report = gate.run(runner(edited(tiny, swap_q_and_k), {}), "fp32")
    assert not report.passed
    assert report.parity.not_compared == tuple(blocks)
    assert "EMBEDDING" in report.reasons[0]


def test_refused_when_precision_has_no_line(gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    with pytest.raises(VerifyError, match="no parity line for this precision: 'fp4'"):
        gate.run(runner(tiny, blocks), "fp4")


def test_one_call_is_enough_when_there_is_one_candidate(
    tiny: onnx_ir.Model, blocks: dict[str, str], settings: GateSettings
) -> None:
    assert run_gate(runner(tiny, blocks), runner(tiny, blocks, optimise=True), settings, "fp32").passed
