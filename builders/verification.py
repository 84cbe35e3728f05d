"""The commands `verify` and `plan`: the gate and the compiler on what `build` would make, without publishing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from builders.build import graph_cache
from builders.engine import describe_plans, graph_target, make_tokenizer, reference_graph, target_of, throttled
from builders.errors import CompileError, PrecisionError
from builders.graph import make_graph, recipe_for, runner_of
from builders.graph_file import save_graph
from builders.judge import calibrated, calibration_of, datasets, find_cause, make_gate
from builders.precision import Precision
from builders.render import bucket_plan
from builders.settings import DeploySettings
from builders.source import open_source
from builders.tensorrt.adapter import Flavour, ProfileShape, open_tensorrt
from builders.tensorrt.compile import compile_plan
from builders.verify.bisect import BisectReport
from builders.verify.gate import GateReport

if TYPE_CHECKING:
    import onnx_ir

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Checked:
    """What `verify` found; `bisect` when the gate failed and the cause was asked for."""

    report: GateReport
    bisect: BisectReport | None


def run_verify(
    settings: DeploySettings,
    cache: Path,
    progress: Progress,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    onnx: Path | None = None,
    data: Path | None = None,
    calibration: Path | None = None,
    precision: str | None = None,
    target: str | None = None,
    find: bool = False,
    spoil: Callable[[onnx_ir.Model], None] | None = None,
) -> Checked:
    """Judge the graph of a deployment against its FP32 export.

    Args:
        settings: the deployment.
        cache: folder of exported graphs.
        progress: told one line per step.
        only: fusion steps to run alone.
        skip: fusion steps to leave out.
        onnx: a graph that enters at fuse.
        data: the user's texts.
        calibration: the user's texts for int8's scales.
        precision: instead of the settings' own.
        target: what to fuse for, instead of the engine's.
        find: bisect a failed gate.
        spoil: changes the finished graph before it is judged; for tests of the gate.

    Raises:
        BuilderError: the graph cannot be made, or the data cannot be read.
    """
    cache = graph_cache(cache)
    chosen = _precision(precision or settings.engine.precision)
    source = open_source(settings.model)
    plan = bucket_plan(settings, source)
    recipe = recipe_for(target or target_of(settings), chosen, only, skip)
    tokenizer = make_tokenizer(source, cache)
    recipe = calibrated(recipe, plan, tokenizer, source.task, calibration_of(chosen, source.task, calibration))
    reference, _ = reference_graph(source, onnx, cache, progress)
    texts = datasets(data, source.task)
    gate = make_gate(settings, plan, tokenizer, reference, texts, source.task)
    longest = plan.buckets[-1].length
    # Not step by step: `verify` shows the whole picture of a graph that `build` would have stopped at.
    made = make_graph(reference, source, recipe, longest=longest, gate=None, progress=progress)
    if spoil is not None:
        spoil(made.model)
    progress("accuracy gate: parity in every bucket, then the task metric (a minute or two)")
    report = gate.run(runner_of(made.model, recipe.precision), recipe.precision)
    cause = find_cause(reference, source, recipe, gate, longest) if find and not report.passed else None
    return Checked(report, cause)


def run_plan(
    settings: DeploySettings, cache: Path, progress: Progress, flavour: str, output: Path, skip: Sequence[str] = ()
) -> Iterator[str]:
    """Compile the plans of a deployment into a folder; yields a line per plan and per kind of fused layer.

    Raises:
        CompileError: no such TensorRT, or it makes no plan.
    """
    if flavour not in get_args(Flavour):
        raise CompileError(
            "no such flavour", value=flavour, limit=", ".join(get_args(Flavour)), remedy="correct --flavour"
        )
    tensorrt = open_tensorrt(cast(Flavour, flavour))
    source = open_source(settings.model)
    plan = bucket_plan(settings, source)
    recipe = recipe_for(graph_target(tensorrt), settings.engine.precision, (), skip)
    reference, _ = reference_graph(source, None, graph_cache(cache), progress)
    made = make_graph(reference, source, recipe, longest=plan.buckets[-1].length, gate=None, progress=progress)
    graph = save_graph(made.model, output / "model.onnx")
    compiled = compile_plan(
        graph,
        [ProfileShape(bucket.length, bucket.batch) for bucket in plan.buckets],
        output / "model.plan",
        tensorrt=tensorrt,
        timing_cache=output / "timings",
        progress=throttled(progress),
    )
    yield f"{_named(compiled.fingerprint)}: {len(compiled.plans)} plan(s) in {compiled.seconds:.1f} s"
    yield from describe_plans(compiled)
    for part in compiled.plans:
        listing = output / f"{part.path.stem}.layers.json"
        listing.write_text(json.dumps(part.listing.to_json(), indent=2) + "\n", encoding="utf-8")
        yield f"layers of {part.path}: {listing}"


def _named(fingerprint: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fingerprint.items() if value is not None)


def _precision(name: str) -> Precision:
    if name not in get_args(Precision):
        raise PrecisionError("no such precision", value=name, limit=", ".join(get_args(Precision)), remedy="name one")
    return cast(Precision, name)
