"""From a source to the files that a version's lanes serve, with everything that is known of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.bucket import BucketPlan
from builders.errors import CompileError, ExportError
from builders.graph import MadeGraph, Recipe, make_graph, runner_of
from builders.judge import accuracy_rows, datasets, make_gate
from builders.machine import this_machine
from builders.manifest import BuiltBucket, sha256_of
from builders.settings import DeploySettings
from builders.source import EncoderSource
from builders.tensorrt.adapter import ProfileShape, TensorRT, open_tensorrt
from builders.tensorrt.compile import CompileReport, compile_plan
from builders.verify.gate import Gate, GateReport, require
from builders.verify.report import BuildReport, ProfileRow, StepRow

if TYPE_CHECKING:
    import onnx_ir

    from builders.build import BuildOptions

Progress = Callable[[str], None]

#: As in the export: above this, weights go to a file of their own and are streamed.
_EXTERNAL_ABOVE = 1_000_000_000


@dataclass(frozen=True)
class Engines:
    """What the lanes serve."""

    tokenizer: Path
    """tokenizer.json."""
    files: Path | Mapping[str, Path]
    """The engine's file for all lanes, or one per bucket model."""
    facts: dict[str, Any]
    """What the manifest gets to know."""
    report: BuildReport
    """The build's report, its version still unknown."""

    def reported(self, version: int) -> BuildReport:
        """The report with the version it led to."""
        return replace(self.report, version=version)


def target_of(settings: DeploySettings) -> str:
    """What the graph is fused for.

    Raises:
        CompileError: `engine.kind: tensorrt` without TensorRT on this machine.
    """
    return "onnxruntime" if settings.engine.kind == "onnxruntime" else graph_target(open_tensorrt("tensorrt"))


def graph_target(tensorrt: TensorRT) -> str:
    """The key of the fusion targets for a TensorRT."""
    if tensorrt.flavour == "rtx":
        return "tensorrt-rtx"
    if tensorrt.capabilities.attention_op:
        return "tensorrt-10.14"
    return "tensorrt-10" if tensorrt.capabilities.strong_typing else "tensorrt-8.6"


def make_engines(
    settings: DeploySettings,
    source: EncoderSource,
    plan: BucketPlan,
    recipe: Recipe,
    options: BuildOptions,
    cache: Path,
    progress: Progress,
) -> Engines:
    """Export, fuse, convert, judge and compile.

    Args:
        settings: the deployment.
        source: the model.
        plan: the buckets.
        recipe: what is done to the graph.
        options: the command line's.
        cache: folder of graphs and timings made by the same code.
        progress: told one line per step.

    Raises:
        BuilderError: what failed; nothing outside the cache was written.
    """
    tokenizer = make_tokenizer(source, cache)
    reference, exported = reference_graph(source, options.onnx, cache, progress)
    progress(f"fusing for {recipe.target}: {', '.join(recipe.steps) or 'no steps'}")
    gate = make_gate(settings, plan, tokenizer, reference, datasets(options.data)) if options.gate else None
    longest = plan.buckets[-1].length
    made = make_graph(reference, source, recipe, longest=longest, gate=gate, progress=progress)
    judged = _judge(gate, made, recipe, progress)
    name = f"{source.sha256[:12]}-{recipe.target}-{'-'.join(recipe.steps) or 'plain'}"
    graph = save_graph(made.model, cache / name / "model.onnx")
    compiled = _compile(settings, plan, graph, cache, progress) if settings.engine.kind == "tensorrt" else None
    facts: dict[str, Any] = {"export": exported, "accuracy": accuracy_rows(judged) if judged else ()}
    files: Path | Mapping[str, Path] = graph
    if compiled is not None:
        files = plan_files(plan, compiled)
        memory = {f"encoder_{row.bucket}": row.activation_bytes for row in profile_rows(compiled)}
        facts |= {"machine": this_machine(), "profile_memory": memory, "buckets": plan_buckets_of(plan, compiled)}
    report = _build_report(source, recipe, exported, graph, made, judged, compiled)
    return Engines(tokenizer, files, facts, report)


def make_tokenizer(source: EncoderSource, cache: Path) -> Path:
    """The tokenizer.json that is published."""
    from builders.tokenizer_files import write_tokenizer

    return write_tokenizer(source, cache / f"{source.sha256[:12]}-tokenizer")


def reference_graph(
    source: EncoderSource, given: Path | None, cache: Path, progress: Progress
) -> tuple[onnx_ir.Model, dict[str, Any]]:
    """The FP32 graph that everything is judged against, and the exporter's report; exported once per model and code.

    Raises:
        ExportError: the model cannot be exported, or the given file is no graph with the lanes' contract.
    """
    import onnx_ir

    if given is not None:
        return _given_graph(given), {"onnx": given.name, "sha256": sha256_of(given)}
    folder = cache / f"{source.sha256[:12]}-fp32"
    path, report = folder / "model.onnx", folder / "export.json"
    facts = _read_report(report)
    if facts is None or not path.exists() or path.stat().st_size + _beside(path) != facts["bytes"]:
        # torch and transformers take seconds to import; a build that finds its graph does not need them.
        from builders.export import export_onnx

        progress(f"exporting {source.folder.name} ({source.family}, {source.positions} positions) to ONNX")
        facts = asdict(export_onnx(source, path))
        draft = report.with_name(f".{report.name}.{os.getpid()}")
        draft.write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
        draft.replace(report)
    # Where the file lies on this machine is nobody's business in a manifest.
    return onnx_ir.load(path), {name: value for name, value in facts.items() if name not in ("path", "external")}


def _read_report(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts.get("bytes"), int) else None


def _beside(path: Path) -> int:
    weights = path.with_name(f"{path.name}.data")
    return weights.stat().st_size if weights.exists() else 0


def _given_graph(path: Path) -> onnx_ir.Model:
    import onnx_ir

    from builders.export import INPUTS, OUTPUT

    try:
        model = onnx_ir.load(path)
    except Exception as error:  # protobuf and onnx_ir each raise their own kinds
        raise ExportError(f"the file is no ONNX graph: {error}", value=str(path), remedy="correct --onnx") from None
    inputs, outputs = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    if sorted(map(str, inputs)) != sorted(INPUTS) or outputs != [OUTPUT]:
        raise ExportError(
            "the graph has not the lanes' contract",
            value=f"inputs {inputs}, outputs {outputs}",
            limit=f"inputs {list(INPUTS)}, output {OUTPUT} (docs/architecture.md)",
            remedy="export it with mask, positions and pooling inside the graph, or give the model's folder",
        )
    return model


def _judge(gate: Gate | None, made: MadeGraph, recipe: Recipe, progress: Progress) -> GateReport | None:
    if gate is None:
        return None
    progress("accuracy gate: parity in every bucket, then the task metric (a minute or two)")
    report = gate.run(runner_of(made.model, recipe.precision), recipe.precision)
    progress(f"  {report.parity.summary()}")
    for metric in report.metrics:
        progress(f"  {metric.summary()}")
    return require(report, "the build")


def save_graph(model: onnx_ir.Model, path: Path) -> Path:
    """Write a graph whole or not at all; weights above 1 GB beside it."""
    import onnx_ir

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    big = sum(tensor.nbytes for tensor in tensors if tensor is not None) > _EXTERNAL_ABOVE
    draft = path.with_name(f".{os.getpid()}") / path.name
    draft.parent.mkdir()
    try:
        onnx_ir.save(model, draft, external_data=f"{path.name}.data" if big else None)
        for file in sorted(draft.parent.iterdir(), reverse=True):
            file.replace(path.with_name(file.name))
    finally:
        for file in draft.parent.iterdir():
            file.unlink()
        draft.parent.rmdir()
    return path


def _compile(settings: DeploySettings, plan: BucketPlan, graph: Path, cache: Path, progress: Progress) -> CompileReport:
    tensorrt = open_tensorrt("tensorrt")
    progress(f"compiling for {tensorrt.fingerprint}")
    if this_machine().gpu is None:
        raise CompileError(
            "a plan is compiled on the GPU that runs it, and this machine has none",
            remedy="build on the serving machine, or use --config deploy.cpu.yaml",
        )
    return compile_plan(
        graph,
        [ProfileShape(bucket.length, bucket.batch) for bucket in plan.buckets],
        graph.with_name("model.plan"),
        tensorrt=tensorrt,
        timing_cache=cache / "timings",
        progress=throttled(progress),
    )


def throttled(progress: Progress) -> Callable[[str, int, int], None]:
    """TensorRT reports thousands of steps; one line per phase and tenth of it is enough."""
    shown: set[tuple[str, int]] = set()

    def tell(phase: str, done: int, total: int) -> None:
        key = (phase, 10 * done // max(1, total))
        if key not in shown:
            shown.add(key)
            progress(f"  {phase}: {done} of {total}")

    return tell


def plan_files(plan: BucketPlan, compiled: CompileReport) -> Mapping[str, Path]:
    """Each bucket model's plan: the one of all, or its own below TensorRT 10."""
    by_length = {shape.length: made.path for made in compiled.plans for shape in made.profiles}
    return {bucket.model: by_length[bucket.length] for bucket in plan.buckets}


def plan_buckets_of(plan: BucketPlan, compiled: CompileReport) -> tuple[BuiltBucket, ...]:
    """The buckets with the number of their profile in their own plan."""
    places = {shape.length: place for made in compiled.plans for place, shape in enumerate(made.profiles)}
    return tuple(BuiltBucket(length=b.length, index=places[b.length], batch=b.batch) for b in plan.buckets)


def profile_rows(compiled: CompileReport) -> tuple[ProfileRow, ...]:
    """Activation memory by profile, as far as TensorRT says it."""
    rows = []
    for made in compiled.plans:
        sizes = made.profile_memory or (made.activation_bytes,) * len(made.profiles)
        for shape, size in zip(made.profiles, sizes, strict=True):
            if size is not None:
                rows.append(ProfileRow(shape.length, shape.batch_max, size))
    return tuple(rows)


def _build_report(
    source: EncoderSource,
    recipe: Recipe,
    exported: dict[str, Any],
    graph: Path,
    made: MadeGraph,
    judged: GateReport | None,
    compiled: CompileReport | None,
) -> BuildReport:
    import datetime

    sizes = {"exported graph": int(exported.get("bytes", 0)), "graph": graph.stat().st_size + _beside(graph)}
    times = {"export": float(exported.get("seconds", 0.0)), **made.seconds}
    if judged is not None:
        times["verify"] = judged.seconds
    if compiled is not None:
        times["compile"] = compiled.seconds
        sizes |= {f"plan {'-'.join(str(s.length) for s in p.profiles)}": p.bytes for p in compiled.plans}
    return BuildReport(
        model=source.folder.name,
        model_sha256=source.sha256,
        precision=recipe.precision,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=f"{platform.machine()}, {this_machine()}, Python {platform.python_version()}",
        steps=_step_rows(made),
        sizes={name: size for name, size in sizes.items() if size},
        times={name: seconds for name, seconds in times.items() if seconds},
        operators=made.fusion.operators_after,
        gate=judged,
        memory=profile_rows(compiled) if compiled else (),
    )


def _step_rows(made: MadeGraph) -> tuple[StepRow, ...]:
    rows = []
    for step in made.fusion.steps:
        kinds = list(step.sites)
        rows.append(
            StepRow(
                name=step.name,
                found=sum(made.fusion.found[kind] for kind in kinds) if kinds else None,
                expected=sum(made.fusion.expected[kind] for kind in kinds) if kinds else None,
                nodes_before=step.nodes_before,
                nodes_after=step.nodes_after,
                seconds=step.seconds,
                note="" if step.changed else "left the graph unchanged",
            )
        )
    if made.precision.precision != "fp32":
        nodes = made.fusion.nodes_after
        clamped = (
            f"mask constants replaced by -1e4: {', '.join(made.precision.clamped)}" if made.precision.clamped else ""
        )
        after = nodes + made.precision.casts
        rows.append(StepRow(made.precision.precision, None, None, nodes, after, made.seconds["precision"], clamped))
    return tuple(rows)
