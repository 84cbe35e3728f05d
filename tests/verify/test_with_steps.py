"""The gate on what the build's own steps make: block names, conversion and rounding, the fusion's callback."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir
import pytest

from builders.verify.gate import Gate, GateError, GateReport, step_gate
from builders.verify.runner import OUTPUT, Runner
from tests.verify.graphs import Edit, array_of, edited, norms, runner, swap_q_and_k

fuse = pytest.importorskip("builders.fuse.pipeline")
named = pytest.importorskip("builders.fuse.blocks")
precision = pytest.importorskip("builders.precision")
rounding = pytest.importorskip("builders.rounding")


def show(model: onnx_ir.Model) -> Runner:
    return runner(model, {block.name: block.value for block in named.block_outputs(model)})


def half(gate: Gate, model: onnx_ir.Model, edit: Edit = lambda _: None) -> GateReport:
    """The gate's report on a graph that was fused and converted to FP16; `edit` comes after the conversion."""
    copy = model.clone()
    fuse.fuse(copy, family="bert", layers=3)
    precision.convert(copy, "fp16")
    edit(copy)
    return gate.run(show(rounding.round_fp16_casts(copy)), "fp16")


def narrow_statistics(model: onnx_ir.Model) -> None:
    norms(model)[1].attributes["stash_type"] = onnx_ir.AttrInt64("stash_type", 10)


def lowest_mask(model: onnx_ir.Model) -> None:
    import numpy as np

    found = [value for value in model.graph.initializers.values() if value.const_value and value.const_value.size == 1]
    for value in found:
        if abs(array_of(value).astype(np.float64).item() + 1e4) < 10:
            array = np.full(array_of(value).shape, -np.inf, array_of(value).dtype)
            value.const_value = onnx_ir.tensor(array, name=value.name)


def test_fused_fp16_graph_passes_when_healthy(gate: Gate, tiny: onnx_ir.Model) -> None:
    report = half(gate, tiny)
    assert report.passed, report.reasons
    assert [block.name for block in report.parity.blocks][0::7] == ["embeddings.norm", OUTPUT]
    assert report.parity.not_compared == ()


def test_mask_is_caught_when_fp16_cannot_hold_it(gate: Gate, tiny: onnx_ir.Model) -> None:
    report = half(gate, tiny, lowest_mask)
    assert not report.finite
    assert report.parity.first_below is not None
    assert report.parity.first_below.name == "layer.0.attention.norm"


@dataclass(frozen=True)
class SwapQueryAndKey:
    """A planted step of the fusion."""

    name: str = "planted"
    summary: str = "swaps Q and K"
    sites: tuple[str, ...] = ()

    def apply(self, model: onnx_ir.Model, context: object) -> int:
        swap_q_and_k(model)
        return 1


def test_fusion_stops_at_the_bad_step_when_one_is_planted(gate: Gate, tiny: onnx_ir.Model) -> None:
    steps = list(fuse.default_steps())
    steps.insert(3, SwapQueryAndKey())
    with pytest.raises(GateError, match="step planted fails the accuracy gate"):
        fuse.fuse(edited(tiny), family="bert", layers=3, steps=steps, gate=step_gate(gate, show))


def test_fusion_goes_through_when_every_step_is_gated(gate: Gate, tiny: onnx_ir.Model) -> None:
    report = fuse.fuse(edited(tiny), family="bert", layers=3, gate=step_gate(gate, show))
    assert any(step.changed for step in report.steps)
