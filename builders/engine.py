"""From a source to the files that a version's lanes serve, with everything that is known of them."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.bucket import BucketPlan
from builders.calibration import Calibration
from builders.errors import CompileError
from builders.graph import MadeGraph, Recipe, make_graph, runner_of
from builders.graph_file import check_contract, graph_bytes, load_graph, save_graph, sha256_of_graph
from builders.judge import accuracy_rows, calibrated, make_gate
from builders.latency import measure_graph, measure_plans
from builders.machine import this_machine
from builders.manifest import BuiltBucket, Latency
from builders.settings import DeploySettings
from builders.source import EncoderSource
from builders.tensorrt.adapter import ProfileShape, TensorRT, open_tensorrt
from builders.tensorrt.compile import CompileReport, compile_plan
from builders.verify.data import Dataset
from builders.verify.gate import Gate, GateError, GateReport, require
from builders.verify.plan_runner import PlanRunner
from builders.verify.report import BuildReport, ProfileRow, StepRow, write_report
from builders.verify.runner import Runner

if TYPE_CHECKING:
    import onnx_ir

    from builders.build import BuildOptions

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """Where a build works."""

    cache: Path
    """Folder of graphs that belongs to today's code."""
    name: str
    """Of the folder of what only this build makes; builds of different things never share one."""
    reports: Path
    """Folder of reports."""

    @property
    def own(self) -> Path:
        """Folder of what only this build makes."""
        return self.cache / self.name


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
    reports: Path
    """Folder of reports."""
    listings: Mapping[str, Any] = field(default_factory=dict)
    """Layer listings of the plans by file name."""

    def write_report(self, version: int) -> Path:
        """Write the report of a published version, the plans' layers beside it; returns the folder."""
        folder = report_folder(self.reports, self.report, f"v{version}")
        write_report(folder, replace(self.report, version=version))
        for name, listing in self.listings.items():
            (folder / name).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
        return folder


def report_folder(reports: Path, report: BuildReport, what: str) -> Path:
    """`reports/MODEL-v3-2026-11-29T120000`."""
    return reports / f"{report.model}-{what}-{report.date[:19]}".replace(":", "")


def target_of(settings: DeploySettings) -> str:
    """What the graph is fused for.

    Raises:
        CompileError: `engine.kind: tensorrt` without TensorRT or without a GPU on this machine.
    """
    if settings.engine.kind == "onnxruntime":
        return "onnxruntime"
    target = graph_target(open_tensorrt("tensorrt"))
    if this_machine().gpu is None:
        raise CompileError(
            "a plan is compiled on the GPU that runs it, and this machine has none",
            remedy="build on the serving machine, or use --config deploy.cpu.yaml",
        )
    return target


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
    data: Sequence[Dataset],
    work: Work,
    progress: Progress,
    texts: Calibration | None = None,
) -> Engines:
    """Export, fuse, convert, judge and compile.

    Args:
        settings: the deployment.
        source: the model.
        plan: the buckets.
        recipe: what is done to the graph.
        options: the command line's.
        data: what the gate's task metric is taken on.
        work: where files go.
        progress: told one line per step.
        texts: what int8 is calibrated with.

    Raises:
        GateError: the graph fails the gate; its report is written.
        BuilderError: what failed; nothing outside the cache was written.
    """
    tokenizer = make_tokenizer(source, work.cache)
    recipe = calibrated(recipe, plan, tokenizer, source.task, texts)
    reference, exported = reference_graph(source, options.onnx, work.cache, progress)
    progress(f"fusing for {recipe.target}: {', '.join(recipe.steps) or 'no steps'}")
    gate = make_gate(settings, plan, tokenizer, reference, data, source.task) if options.gate else None
    compiled = None
    try:
        made = make_graph(reference, source, recipe, longest=plan.buckets[-1].length, gate=gate, progress=progress)
        judged = _judge(gate, runner_of(made.model, recipe.precision), recipe, "the graph", progress)
        graph = save_graph(made.model, work.own / "model.onnx")
        if settings.engine.kind == "tensorrt":
            compiled = _compile(settings, plan, graph, work, progress)
            # What is published is what was judged: the CPU's view of the graph is not the plan's.
            judged = _judge_plans(gate, plan, compiled, recipe, progress)
    except GateError as error:
        failed = _build_report(source, recipe, exported, None, None, error.report, None)
        folder = report_folder(work.reports, failed, "failed")
        write_report(folder, failed)
        progress(f"report: {folder / 'report.html'}")
        raise
    facts: dict[str, Any] = {"export": exported, "accuracy": accuracy_rows(judged) if judged else ()}
    if made.precision.products:
        facts["products"] = tuple(asdict(product) for product in made.precision.products)
    files: Path | Mapping[str, Path] = graph
    listings: dict[str, Any] = {}
    if options.gate:
        progress("timing every bucket")
        facts["latency"] = _latency(settings, source, plan, graph, compiled)
    if compiled is not None:
        files = plan_files(plan, compiled)
        memory = {settings.lane_model(row.bucket): row.activation_bytes for row in profile_rows(compiled)}
        facts |= {"machine": this_machine(), "profile_memory": memory, "buckets": plan_buckets_of(plan, compiled)}
        listings = {f"{part.path.stem}.layers.json": part.listing.to_json() for part in compiled.plans}
        for line in describe_plans(compiled):
            progress(f"  {line}")
    report = _build_report(source, recipe, exported, graph, made, judged, compiled)
    return Engines(tokenizer, files, facts, report, work.reports, listings)


def _latency(
    settings: DeploySettings, source: EncoderSource, plan: BucketPlan, graph: Path, compiled: CompileReport | None
) -> Latency:
    """What is published, timed on this machine."""
    if compiled is None:
        return measure_graph(graph, settings, plan, source.task.contract)
    return measure_plans(_plans(plan, compiled), plan, source.task.contract, str(this_machine()))


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
    if given is not None:
        return _given_graph(given, source), {"onnx": given.name, "sha256": sha256_of_graph(given)}
    folder = cache / f"{source.sha256[:12]}-fp32"
    path, report = folder / "model.onnx", folder / "export.json"
    facts = _read_report(report)
    # By content: a damaged reference would be compared with itself and pass.
    if facts is None or not path.exists() or sha256_of_graph(path) != facts["sha256"]:
        # torch and transformers take seconds to import; a build that finds its graph does not need them.
        from builders.export import export_onnx

        progress(f"exporting {source.folder.name} ({source.family}, {source.positions} positions) to ONNX")
        facts = asdict(export_onnx(source, path))
        draft = report.with_name(f".{report.name}.{os.getpid()}")
        draft.write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
        draft.replace(report)
    # Where the file lies on this machine is nobody's business in a manifest.
    return load_graph(path), {name: value for name, value in facts.items() if name not in ("path", "external")}


def _read_report(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts.get("sha256"), str) else None


def _given_graph(path: Path, source: EncoderSource) -> onnx_ir.Model:
    model = load_graph(path)
    check_contract(model, source.task.contract, positions=source.positions)
    return model


def _judge(gate: Gate | None, candidate: Runner, recipe: Recipe, what: str, progress: Progress) -> GateReport | None:
    if gate is None:
        return None
    progress(f"accuracy gate on {what}: parity in every bucket, then the task metric (a minute or two)")
    report = gate.run(candidate, recipe.precision)
    progress(f"  {report.parity.summary()}")
    for metric in report.metrics:
        progress(f"  {metric.summary()}")
    return require(report, what)


def _judge_plans(
    gate: Gate | None, plan: BucketPlan, compiled: CompileReport, recipe: Recipe, progress: Progress
) -> GateReport | None:
    if gate is None:
        return None
    with PlanRunner(_plans(plan, compiled)) as runner:
        return _judge(gate, runner, recipe, "the plan", progress)


def _plans(plan: BucketPlan, compiled: CompileReport) -> dict[int, tuple[Path, int]]:
    """Bucket length -> plan file and number of the bucket's profile in it."""
    files, buckets = plan_files(plan, compiled), plan_buckets_of(plan, compiled)
    return {b.length: (files[part.model], b.index) for part, b in zip(plan.buckets, buckets, strict=True)}


def _compile(settings: DeploySettings, plan: BucketPlan, graph: Path, work: Work, progress: Progress) -> CompileReport:
    tensorrt = open_tensorrt("tensorrt")
    progress(f"compiling with TensorRT {tensorrt.version}")
    limit = settings.engine.memory_limit_mb
    return compile_plan(
        graph,
        [ProfileShape(bucket.length, bucket.batch) for bucket in plan.buckets],
        graph.with_name("model.plan"),
        tensorrt=tensorrt,
        timing_cache=work.cache / "timings",
        memory_limit_bytes=None if limit is None else limit * 2**20,
        progress=throttled(progress),
    )


def describe_plans(compiled: CompileReport) -> Iterator[str]:
    """A few lines on what TensorRT made of the graph."""
    for made in compiled.plans:
        counts = made.counts
        fused = {
            "attention": counts.attention,
            "layer norm with residual": counts.layer_norm_residual,
            "GELU with bias": counts.gelu_bias,
            "merged QKV": counts.qkv,
        }
        lengths = ", ".join(str(shape.length) for shape in made.profiles)
        yield f"{made.path.name}: buckets {lengths}, {made.bytes / 1e6:.1f} MB, {counts.layers} layers"
        yield ", ".join(f"{name} {part.found}/{part.sites}" for name, part in fused.items())
        if counts.opaque:
            yield f"{counts.opaque} layers do not say what they compute: what is not found may still be fused"


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
    graph: Path | None,
    made: MadeGraph | None,
    judged: GateReport | None,
    compiled: CompileReport | None,
) -> BuildReport:
    sizes = {"exported graph": int(exported.get("bytes", 0)), "graph": graph_bytes(graph) if graph else 0}
    times = {"export": float(exported.get("seconds", 0.0)), **(made.seconds if made else {})}
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
        steps=_step_rows(made) if made else (),
        sizes={name: size for name, size in sizes.items() if size},
        times={name: seconds for name, seconds in times.items() if seconds},
        operators=made.fusion.operators_after if made else {},
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
        products = made.precision.products
        found, expected = (sum(p.int8 for p in products), len(products)) if products else (None, None)
        seconds = made.seconds["precision"]
        rows.append(StepRow(made.precision.precision, found, expected, nodes, after, seconds, clamped))
    return tuple(rows)
