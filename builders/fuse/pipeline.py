"""All fusion steps in their order, each counted, gated and reported."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from builders.errors import FuseError
from builders.fuse.attention import OneAttention
from builders.fuse.blocks import BlockOutput, name_blocks
from builders.fuse.clean import Clean, prepare
from builders.fuse.norms import Gelu, LayerNorm
from builders.fuse.positions import Positions
from builders.fuse.qkv import MergeQkv
from builders.fuse.scale import ScaleMask
from builders.fuse.sites import count_sites
from builders.fuse.step import LIST, TARGETS, Context, Step, Target
from builders.fuse.table import check_sites, expected_sites

Gate = Callable[[ir.Model, ir.Model, str], None]
"""Called after each step that changed the graph: the graph before, the graph after, the step's name."""

# The norms come first: their pieces are what a clean-up may touch, and they bound the blocks that positions and counts
# look at. Q, K and V are merged before the scale goes into the merged product, and the core becomes one operator last,
# when nothing is left beside it.
_STEPS: tuple[Step, ...] = (LayerNorm(), Gelu(), Clean(), Positions(), MergeQkv(), ScaleMask(), OneAttention())


@dataclass(frozen=True)
class StepReport:
    """What one step did."""

    name: str
    """The step."""
    rewritten: int
    """Places that it rewrote."""
    sites: dict[str, int]
    """Sites of its kinds right after it."""
    nodes_before: int
    """Nodes of the graph before it."""
    nodes_after: int
    """Nodes of the graph after it."""
    changed: bool
    """It rewrote something."""
    seconds: float
    """Time taken, the gate excluded."""

    def __str__(self) -> str:
        """One line for the screen."""
        sites = ", ".join(f"{kind} {count}" for kind, count in self.sites.items())
        did = (
            f"{self.rewritten} rewritten, nodes {self.nodes_before} -> {self.nodes_after}"
            if self.changed
            else "left the graph unchanged"
        )
        return f"{self.name}: {did}{f' ({sites})' if sites else ''}, {self.seconds:.2f} s"


@dataclass(frozen=True)
class FuseReport:
    """What the fusion did to the graph."""

    family: str
    """Key of the table of sites."""
    layers: int
    """Transformer blocks."""
    target: str
    """What the graph is made for."""
    steps: tuple[StepReport, ...]
    """In the order in which they ran."""
    skipped: tuple[str, ...]
    """Steps that did not run."""
    expected: dict[str, int]
    """Sites by kind, of the family's table; empty for a family without a row."""
    found: dict[str, int]
    """Sites by kind, of the final graph; those of the steps that ran equal `expected`."""
    operators_before: dict[str, int]
    """Nodes by operator, most frequent first."""
    operators_after: dict[str, int]
    """Nodes by operator, most frequent first."""
    blocks: tuple[BlockOutput, ...]
    """Block outputs of the final graph; empty when its LayerNorms are not single operators (`layer_norm` skipped), or
    not two a layer (families without a row)."""
    opset: int
    """Version of the standard operators of the final graph."""
    seconds: float
    """Time taken, the gate included."""

    @property
    def nodes_before(self) -> int:
        """Nodes of the graph that came in."""
        return sum(self.operators_before.values())

    @property
    def nodes_after(self) -> int:
        """Nodes of the graph that went out."""
        return sum(self.operators_after.values())


def list_steps() -> tuple[Step, ...]:
    """All steps in their order, those included that are off by default for a target."""
    return _STEPS


def default_steps(target: str = "onnxruntime") -> tuple[Step, ...]:
    """The steps that run for a target unless they are skipped.

    Raises:
        FuseError: no such target.
    """
    found = _target(target)
    return tuple(step for step in _STEPS if step.name not in found.off)


def fuse(
    model: ir.Model,
    *,
    family: str,
    layers: int,
    target: str = "onnxruntime",
    steps: Sequence[Step] | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    max_length: int = 4096,
    gate: Gate | None = None,
    traits: Collection[str] = (),
) -> FuseReport:
    """Fuse a graph in place and check what came out against its family's table.

    Args:
        model: the exported graph; any opset from 18 on (below, as far as onnx's own converter goes).
        family: `model_type` of config.json.
        layers: transformer blocks.
        target: key of `TARGETS`.
        steps: the steps to choose from; left out, those of the target.
        only: run these steps alone; a step that is off by default for the target can be named.
        skip: leave these steps out.
        max_length: longest text that computed positions must reach, tokens: max(4096, the largest bucket).
        gate: called after each step that changed the graph, with the graphs before and after and the step's name;
            what it raises stops the fusion. The graph before shares its weights with the one after.
        traits: what of the model's config and head changes the table (`expected_sites`).

    Raises:
        FuseError: unknown target or step, or a count that differs from the table. The graph is half fused
            then: write it nowhere.
    """
    start = time.perf_counter()
    expected = expected_sites(family, layers, traits)
    context = Context(_target(target), max_length)
    chosen = _choose(default_steps(target) if steps is None else steps, only, skip)
    before = _operators(model)
    prepare(model)
    reports = tuple(_run(model, step, context, gate) for step in chosen)
    found = count_sites(model)
    check_sites(family, layers, found, {kind for step in chosen for kind in step.sites}, traits)
    _check_operators(model, context.target, chosen)
    blocks = _name_blocks(model, found.sites["layer_norm"], expected.get("layer_norm"))
    _drop_tags(model)
    names = [step.name for step in chosen]
    return FuseReport(
        family=family,
        layers=layers,
        target=target,
        steps=reports,
        skipped=tuple(step.name for step in _STEPS if step.name not in names),
        expected=expected,
        found=found.sites,
        operators_before=before,
        operators_after=_operators(model),
        blocks=blocks,
        opset=model.graph.opset_imports.get("", 0),
        seconds=time.perf_counter() - start,
    )


def _run(model: ir.Model, step: Step, context: Context, gate: Gate | None) -> StepReport:
    nodes = model.graph.num_nodes()
    original = model.clone() if gate is not None else None
    start = time.perf_counter()
    rewritten = step.apply(model, context)
    seconds = time.perf_counter() - start
    if gate is not None and original is not None and rewritten:
        gate(original, model, step.name)
    sites = count_sites(model).sites
    return StepReport(
        name=step.name,
        rewritten=rewritten,
        sites={kind: sites[kind] for kind in step.sites},
        nodes_before=nodes,
        nodes_after=model.graph.num_nodes(),
        changed=bool(rewritten),
        seconds=seconds,
    )


def _name_blocks(model: ir.Model, norms: int, expected: int | None) -> tuple[BlockOutput, ...]:
    if expected not in (None, norms):
        return ()
    try:
        return tuple(name_blocks(model))
    except FuseError:  # other norms than two a layer (DeBERTa's convolution, families without a row)
        return ()


def _check_operators(model: ir.Model, target: Target, chosen: Sequence[Step]) -> None:
    """`Attention` operators that came in (an SDPA export at opset 23) are served as the step makes them, or not."""
    found = sum(node.op_type == "Attention" for node in model.graph)
    if found and not (target.attention and any(step.name == "attention" for step in chosen)):
        raise FuseError(
            "the graph came with Attention operators that the target does not take as they are",
            value=f"{found} Attention, target {target.name}",
            limit="decomposed attention, or the step `attention` for a target that takes the operator",
            remedy="export with eager attention" + (", or run the step `attention`" if target.attention else ""),
        )


def _choose(steps: Sequence[Step], only: Sequence[str], skip: Sequence[str]) -> tuple[Step, ...]:
    known = {step.name: step for step in (*_STEPS, *steps)}
    if unknown := [name for name in (*only, *skip) if name not in known]:
        raise FuseError("no such fusion step", value=unknown, limit=f"steps: {', '.join(known)}", remedy=LIST)
    if only:
        # In the steps' own order, whatever the order on the command line.
        steps = [step for name, step in known.items() if name in only]
    return tuple(step for step in steps if step.name not in skip)


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise FuseError("no such target", value=name, limit=f"targets: {', '.join(TARGETS)}", remedy="name one of them")
    return TARGETS[name]


def _operators(model: ir.Model) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph).most_common())


def _drop_tags(model: ir.Model) -> None:
    """The rewriter's notes on its rules; `namespace`, the module a node came from, stays (see export.py)."""
    for node in model.graph:
        for props in (node.metadata_props, *(value.metadata_props for value in node.outputs)):
            for key in [key for key in props if key != "namespace"]:
                del props[key]
