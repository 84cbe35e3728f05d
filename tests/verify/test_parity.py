from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir
import pytest

from builders.verify.gate import Gate, GateReport, GateSettings
from builders.verify.parity import LINES, ParityCase, compare, describe, make_batch, parity_cases
from builders.verify.runner import OUTPUT, CachedRunner, Floats, Ids, OnnxRunner, VerifyError
from tests.verify.graphs import (
    Edit,
    edited,
    freeze_positions,
    narrow_layer_norm,
    raise_channel,
    remake_scale,
    round_fp16,
    runner,
    swap_q_and_k,
    widen_mask,
)


class Fake:
    """Answers with `change` of random vectors that depend on the tokens alone."""

    def __init__(self, change: Mapping[str, float] | None = None, *, blocks: bool = True):
        self.change, self.blocks, self.calls = change or {}, blocks, 0

    def run(self, input_ids: Ids, length: Ids) -> Mapping[str, Floats]:
        self.calls += 1
        table = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
        hidden = table[input_ids % 100]
        answers = {name: hidden + self.change.get(name, 0.0) for name in ("first", "second")} if self.blocks else {}
        return {**answers, OUTPUT: hidden.mean(1) + self.change.get(OUTPUT, 0.0)}


STREAM = np.arange(1000, dtype=np.int32)
CASES = parity_cases({8: 4})


def test_cases_cover_every_length_alone_and_mixed_when_made() -> None:
    cases = parity_cases({128: 32, 2048: 8}, batches=(2, 5), max_tokens=4096)
    for bucket in (128, 2048):
        alone = {case.lengths for case in cases if case.bucket == bucket and len(case.lengths) == 1}
        assert alone == {(1,), (2,), (7,), (bucket - 1,), (bucket,)}
    mixed = [case for case in cases if len(case.lengths) > 1]
    assert mixed[2] == ParityCase(128, (*((128, 1, 127, 2, 7) * 7)[:31], 0))
    assert mixed[:2] + mixed[3:] == [
        ParityCase(128, (128, 1)),
        ParityCase(128, (128, 1, 127, 2, 0)),
        ParityCase(2048, (2048, 1)),
    ]


def test_cases_keep_to_the_bucket_when_it_is_short() -> None:
    assert [case.lengths for case in parity_cases({2: 1})] == [(2,), (1,)]


def test_batch_pads_with_other_tokens_when_made() -> None:
    ids, length = make_batch(ParityCase(8, (3, 8)), STREAM + 1)
    assert (ids.dtype, ids.shape, length.tolist()) == (np.int32, (2, 8), [[3], [8]])
    assert (ids > 0).all()
    again, _ = make_batch(ParityCase(8, (3, 8)), STREAM + 1)
    np.testing.assert_array_equal(ids, again)


def test_worst_and_first_layer_are_named_when_they_differ() -> None:
    report = compare(Fake(), Fake({"first": 0.2, "second": 0.9}), CASES, STREAM, LINES["fp32"])
    assert not report.passed
    assert (report.first_below and report.first_below.name, report.worst and report.worst.name) == ("first", "second")
    assert "first layer below the line first" in report.summary()
    assert [block.passed for block in report.blocks] == [False, False, True]
    assert sum("below the line" in line for line in describe(report)) == 2


def test_padding_is_not_compared_when_values_differ_there() -> None:
    class Padded(Fake):
        def run(self, input_ids: Ids, length: Ids) -> Mapping[str, Floats]:
            answers = dict(super().run(input_ids, length))
            answers["first"] = answers["first"].copy()
            answers["first"][np.arange(input_ids.shape[1]) >= length] = 9.0
            return answers

    assert compare(Fake(), Padded(), CASES, STREAM, LINES["fp32"]).passed


def test_channel_error_shows_when_a_large_channel_hides_it_from_the_cosine() -> None:
    class Outlier(Fake):
        def run(self, input_ids: Ids, length: Ids) -> Mapping[str, Floats]:
            answers = dict(super().run(input_ids, length))
            first = answers["first"].copy()
            first[..., 0] = 500
            if self.change:
                first[..., 3] = 0
            return answers | {"first": first}

    line = LINES["fp16"]
    report = compare(Outlier(), Outlier({"none": 1.0}), CASES, STREAM, line)
    block = report.blocks[0]
    assert block.cosine > line.cosine
    assert block.channel_error == pytest.approx(1.0)
    assert not report.passed


def test_blocks_are_listed_when_an_engine_shows_only_its_output() -> None:
    report = compare(Fake(), Fake(blocks=False), CASES, STREAM, LINES["fp32"])
    assert report.passed
    assert report.not_compared == ("first", "second")
    assert [block.name for block in report.blocks] == [OUTPUT]


def test_case_is_named_when_the_candidate_cannot_run_it() -> None:
    class Short(Fake):
        def run(self, input_ids: Ids, length: Ids) -> Mapping[str, Floats]:
            if input_ids.shape[0] > 1:
                raise VerifyError("no profile fits")
            return super().run(input_ids, length)

    report = compare(Fake(), Short(), CASES, STREAM, LINES["fp32"])
    assert not report.passed
    assert report.failures[0].startswith("bucket 8, batch 2, lengths 8, 1: no profile fits")
    assert "do not run" in report.summary()


def test_refused_when_shapes_differ() -> None:
    class Wide(Fake):
        def run(self, input_ids: Ids, length: Ids) -> Mapping[str, Floats]:
            return {OUTPUT: np.zeros((len(input_ids), 9), np.float32)}

    with pytest.raises(VerifyError, match="another shape"):
        compare(Fake(), Wide(), CASES, STREAM, LINES["fp32"])


def test_answers_are_kept_when_asked_again() -> None:
    inner = Fake()
    cached = CachedRunner(inner)
    batch = make_batch(CASES[0], STREAM)
    assert cached.run(*batch) is cached.run(*batch)
    assert inner.calls == 1
    small = CachedRunner(inner, most=10)
    small.run(*batch), small.run(*batch)
    assert inner.calls == 3


@pytest.mark.parametrize("optimise", [False, True])
def test_healthy_candidate_passes_when_in_fp32(
    gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str], optimise: bool
) -> None:
    report = gate.run(runner(edited(tiny, remake_scale), blocks, optimise=optimise), "fp32")
    assert report.passed, report.reasons
    assert [block.name for block in report.parity.blocks] == [*blocks, OUTPUT]
    assert len(blocks) == 7


def test_healthy_candidate_passes_when_in_fp16(gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    report = gate.run(runner(edited(tiny, round_fp16), blocks), "fp16")
    assert report.passed, report.reasons
    assert report.parity.worst is not None
    assert report.parity.worst.cosine < 1 - 1e-8  # the rounding is really there


@pytest.mark.parametrize(
    ("edits", "precision", "first"),
    [
        ((swap_q_and_k,), "fp32", "layer.1.attention.norm"),
        ((swap_q_and_k, round_fp16), "fp16", "layer.1.attention.norm"),
        ((freeze_positions,), "fp32", "embeddings.norm"),
        ((freeze_positions, round_fp16), "fp16", "embeddings.norm"),
        ((widen_mask, round_fp16), "fp16", "layer.0.attention.norm"),
    ],
    ids=["swapped-qk", "swapped-qk-fp16", "frozen-positions", "frozen-positions-fp16", "lowest-mask-fp16"],
)
def test_fault_is_caught_and_its_layer_named_when_planted(
    gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str], edits: tuple[Edit, ...], precision: str, first: str
) -> None:
    report = gate.run(runner(edited(tiny, *edits), blocks), precision)
    assert not report.passed
    assert report.parity.first_below is not None
    assert report.parity.first_below.name == first
    assert first in report.reasons[0]


def test_mask_fault_is_not_finite_in_the_row_of_length_zero_when_planted(
    gate: Gate, tiny: onnx_ir.Model, blocks: dict[str, str]
) -> None:
    report = gate.run(runner(edited(tiny, widen_mask, round_fp16), blocks), "fp16")
    assert not report.finite
    assert any("not finite" in reason and "length 0" in reason for reason in report.reasons)


def outlier_report(tiny: onnx_ir.Model, blocks: dict[str, str], settings: GateSettings, *edits: Edit) -> GateReport:
    reference = edited(tiny, raise_channel)
    own = Gate(runner(reference, blocks), settings)
    return own.run(runner(edited(reference, *edits), blocks), "fp16")


def test_layer_norm_in_fp16_is_caught_when_one_channel_is_500_times_larger(
    settings: GateSettings, tiny: onnx_ir.Model, blocks: dict[str, str]
) -> None:
    assert outlier_report(tiny, blocks, settings, round_fp16).passed
    report = outlier_report(tiny, blocks, settings, narrow_layer_norm, round_fp16)
    assert not report.passed
    assert report.parity.first_below is not None
    assert report.parity.first_below.name == "layer.0.attention.norm"


@pytest.mark.parametrize(("said", "asked", "threads"), [("1", 0, 1), ("1", 2, 2), ("", 0, 0), ("4,2", 0, 0)])
def test_threads_are_those_that_were_asked_for_or_that_the_environment_names(
    said: str, asked: int, threads: int, tiny: onnx_ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    options = OnnxRunner(tiny, threads=asked)._session.get_session_options()
    assert options.intra_op_num_threads == threads


def test_value_is_named_when_it_is_not_in_the_graph(tiny: onnx_ir.Model) -> None:
    with pytest.raises(VerifyError, match=r"block first.*'nowhere'"):
        OnnxRunner(tiny, {"first": "nowhere"})


def test_batch_is_named_when_the_graph_cannot_run_it(tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    with pytest.raises(VerifyError, match="cannot run batch 1, L 70"):
        runner(tiny, blocks).run(np.ones((1, 70), np.int32), np.array([[70]], np.int32))


def test_graph_is_unchanged_when_blocks_are_exposed(tiny: onnx_ir.Model, blocks: dict[str, str]) -> None:
    nodes = len(list(tiny.graph))
    runner(tiny, blocks)
    assert ([value.name for value in tiny.graph.outputs], len(list(tiny.graph))) == ([OUTPUT], nodes)
