"""From the exported reference to the graph that is compiled or served: fusion steps, then the precision, each gated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from builders.errors import FuseError
from builders.fuse import FuseReport, block_outputs, default_steps, fuse, list_steps
from builders.fuse.step import LIST
from builders.int8 import Row, quantize_static
from builders.precision import Precision, PrecisionReport, convert
from builders.rounding import round_fp16_casts
from builders.source import EncoderSource
from builders.verify.gate import Gate, step_gate
from builders.verify.runner import OnnxRunner

if TYPE_CHECKING:
    import onnx_ir

#: Computed positions reach at least this far, so that a longer bucket needs no other graph (tokens).
LEAST_LENGTH = 4096


@dataclass(frozen=True)
class Recipe:
    """What is done to the exported graph."""

    target: str
    """Key of `builders.fuse.step.TARGETS`."""
    fusions: tuple[str, ...]
    """Fusion steps, in their order."""
    precision: Precision
    """Type of weights and activations."""
    rows: tuple[Row, ...] = field(default=(), repr=False, compare=False)
    """Calibration texts, for int8 alone."""

    @property
    def steps(self) -> tuple[str, ...]:
        """All steps by name, the precision last; FP32 is none."""
        return (*self.fusions, *(() if self.precision == "fp32" else (self.precision,)))


@dataclass(frozen=True)
class MadeGraph:
    """The graph and what each step said."""

    model: onnx_ir.Model
    fusion: FuseReport
    precision: PrecisionReport
    seconds: dict[str, float]
    """Time of `fuse` and `precision`, gates included."""


def recipe_for(target: str, precision: Precision, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Recipe:
    """The steps of a target, narrowed by the command line.

    Raises:
        FuseError: no such target or step.
    """
    known = [step.name for step in list_steps()]
    if unknown := [name for name in (*only, *skip) if name not in known]:
        raise FuseError("no such fusion step", value=unknown, limit=f"steps: {', '.join(known)}", remedy=LIST)
    chosen = [name for name in known if name in only] if only else [step.name for step in default_steps(target)]
    return Recipe(target, tuple(name for name in chosen if name not in skip), precision)


def make_graph(
    reference: onnx_ir.Model,
    source: EncoderSource,
    recipe: Recipe,
    *,
    longest: int,
    gate: Gate | None,
    progress: Callable[[str], None],
) -> MadeGraph:
    """Fuse and convert a copy of the reference; a step that breaks the graph stops the build at once.

    Args:
        reference: the exported FP32 graph; left as it is.
        source: for the family's table of sites.
        recipe: what to do.
        longest: longest bucket, tokens.
        gate: judges the graph after each step; None leaves that out.
        progress: told one line per step.

    Raises:
        FuseError: counts that differ from the family's table.
        PrecisionError: the graph cannot take the precision.
        GateError: a step changed the answers.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    began = time.perf_counter()
    model = reference.clone()
    fusion = fuse(
        model,
        family=source.family,
        layers=source.layers,
        traits=source.architecture.traits | ({"token_head"} if source.task.per_token else set()),
        target=recipe.target,
        steps=[step for step in list_steps() if step.name in recipe.fusions],
        max_length=max(LEAST_LENGTH, longest),
        gate=None if gate is None else step_gate(gate, lambda graph: runner_of(graph, "fp32")),
    )
    for step in fusion.steps:
        progress(f"  {step}")
    # The steps leave small helper values without a type, and a conversion has to know every one.
    ShapeInferencePass()(model)
    fused = time.perf_counter()
    precision = _convert(model, recipe, progress)
    if recipe.precision != "fp32" and gate is not None:
        gate.check_step(recipe.precision, runner_of(model, recipe.precision), recipe.precision)
    return MadeGraph(model, fusion, precision, {"fuse": fused - began, "precision": time.perf_counter() - fused})


def _convert(model: onnx_ir.Model, recipe: Recipe, progress: Callable[[str], None]) -> PrecisionReport:
    if recipe.precision != "int8":
        report = convert(model, recipe.precision)
        if recipe.precision != "fp32":
            progress(f"  {recipe.precision}: {sum(report.narrow.values())} nodes narrow, {report.casts} casts")
        return report
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    report = convert(model, "fp32")
    progress(f"  int8: calibrating with {len(recipe.rows)} texts")
    products = quantize_static(model, recipe.rows)
    # The FP32 weights that nothing reads any more.
    RemoveUnusedNodesPass()(model)
    narrow = [product for product in products if product.int8]
    kept = [product.name for product in products if not product.int8]
    worst = max((product.error for product in narrow), default=0.0)
    progress(f"  int8: {len(narrow)} of {len(products)} products, error {worst:.1%} at most")
    if kept:
        progress(f"  int8: in FP32 stay {', '.join(kept)}")
    counts = {"MatMul": len(narrow)}
    return replace(report, precision="int8", narrow=counts, casts=2 * len(narrow), products=products)


def runner_of(model: onnx_ir.Model, precision: Precision) -> OnnxRunner:
    """A graph on the CPU as the target computes it: its narrow tensors rounded, its blocks exposed."""
    if precision in ("fp32", "int8"):
        return OnnxRunner(model, _blocks(model))
    # ONNX Runtime computes FP16 in FP32 on a CPU; its optimiser would take the rounding casts out again.
    return OnnxRunner(round_fp16_casts(model), _blocks(model), optimise=False)


def _blocks(model: onnx_ir.Model) -> dict[str, str]:
    try:
        return {block.name: block.value for block in block_outputs(model)}
    except FuseError:
        # Norms that are not single operators yet: the output alone is judged.
        return {}
