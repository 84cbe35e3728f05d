"""The plan: a profile for each bucket, written whole or not at all, with a listing of what was fused."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from builders.errors import CompileError
from builders.graph_file import EXTERNAL_ABOVE, load_graph, save_graph
from builders.tensorrt.adapter import ProfileShape, TensorRT, open_tensorrt
from builders.tensorrt.layers import LayerCounts, LayerListing, parse_inspector, parse_log
from builders.tensorrt.log import BuildLog, Steps
from builders.tensorrt.lower import LowerReport, lower
from builders.tensorrt.sites import Sites, find_sites
from builders.tensorrt.weak_typing import hold_types, node_types

if TYPE_CHECKING:
    import onnx_ir

_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+)")  # 8.6 leaves the unit out


@dataclass(frozen=True)
class PlanReport:
    """One plan file."""

    path: Path
    """The file."""
    sha256: str
    """Hash of its bytes."""
    bytes: int
    """Its size."""
    profiles: tuple[ProfileShape, ...]
    """Its optimisation profiles, in the order of their numbers."""
    seconds: float
    """Time of the builder."""
    counts: LayerCounts
    """What is fused."""
    listing: LayerListing
    """All layers."""
    listing_from: Literal["inspector", "log"]
    """Where the listing was read: the engine inspector, or the builder's log where there is no driver."""
    profile_memory: tuple[int, ...] | None
    """Activation memory of a context by profile, bytes; None where the plan cannot be deserialised here."""
    activation_bytes: int | None
    """Activation memory of the largest profile as the builder says it."""


@dataclass(frozen=True)
class CompileReport:
    """What a compilation made."""

    fingerprint: dict[str, Any]
    """TensorRT and GPU that the plans are tied to."""
    plans: tuple[PlanReport, ...]
    """One plan with all profiles, or, below TensorRT 10, one plan a bucket."""
    lowered: LowerReport
    """What was written out for this TensorRT."""
    warnings: tuple[str, ...]
    """TensorRT's warnings, each once."""
    timings_kept: bool
    """Whether kernel timings of an earlier build were used."""
    seconds: float
    """Time in all."""


def compile_plan(
    onnx: Path,
    profiles: Sequence[ProfileShape],
    plan_path: Path,
    *,
    tensorrt: TensorRT | None = None,
    timing_cache: Path | None = None,
    memory_limit_bytes: int | None = None,
    progress: Steps | None = None,
) -> CompileReport:
    """Compile a graph with the lanes' contract.

    Args:
        onnx: the fused graph after `builders.precision.convert`; it is lowered for the TensorRT here.
        profiles: one for each bucket; profile n of the plan is the n-th.
        plan_path: file to write. Below TensorRT 10, where a context takes the memory of the largest profile of its
            plan, each bucket gets a plan of its own, `NAME_LENGTH.plan` beside it.
        tensorrt: what to compile with; left out, what `open_tensorrt` finds.
        timing_cache: file that keeps kernel timings between builds (nothing for RTX, which times none).
        memory_limit_bytes: workspace the kernels may ask for.
        progress: told each phase and its steps; below TensorRT 10 the plans only.

    Returns:
        A report with the layer listing of each plan.

    Raises:
        CompileError: no TensorRT, a graph it cannot read, or no plan; no plan file was changed.
        ExportError: the file is no ONNX graph, or lacks its data.
    """
    _check(profiles)
    start = time.perf_counter()
    native = tensorrt or open_tensorrt()
    model = load_graph(onnx)
    lowered = lower(model, native.capabilities)
    whole = native.capabilities.profile_memory_per_context
    groups = [tuple(profiles)] if whole else [(profile,) for profile in profiles]
    log, plans, kept = BuildLog(), [], False
    plan_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=plan_path.parent, prefix=f".{plan_path.name}.") as folder:
        graph = save_graph(model, Path(folder) / "lowered.onnx", external_above=EXTERNAL_ABOVE)
        build = _Build(native, graph, model, timing_cache, memory_limit_bytes, progress)
        drafts = []
        for number, group in enumerate(groups):
            target = plan_path if whole else plan_path.with_stem(f"{plan_path.stem}_{group[0].length}")
            if progress and not native.capabilities.progress_monitor:
                progress(f"plan of bucket {group[0].length}", number, len(groups))
            log = BuildLog()
            draft = Path(folder) / target.name
            report, reused = build.run(group, draft, target, log)
            drafts.append((draft, target))
            plans.append(report)
            kept |= reused
            build.warnings.update(dict.fromkeys(log.warnings))
        for draft, target in drafts:  # all of them exist by now
            draft.replace(target)
    return CompileReport(
        fingerprint=native.fingerprint,
        plans=tuple(plans),
        lowered=lowered,
        warnings=tuple(build.warnings),
        timings_kept=kept,
        seconds=time.perf_counter() - start,
    )


class _Build:
    """What the plans of one compilation share."""

    def __init__(
        self,
        native: TensorRT,
        graph: Path,
        model: onnx_ir.Model,
        timing_cache: Path | None,
        memory_limit_bytes: int | None,
        progress: Steps | None,
    ):
        self.native, self.graph = native, graph
        self.inputs = [str(value.name) for value in model.graph.inputs]
        self.types = node_types(model)
        self.sites: Sites = find_sites(model)
        self.timing_cache, self.memory_limit_bytes, self.progress = timing_cache, memory_limit_bytes, progress
        self.warnings: dict[str, None] = {}

    def run(
        self, profiles: tuple[ProfileShape, ...], draft: Path, target: Path, log: BuildLog
    ) -> tuple[PlanReport, bool]:
        """Build one plan into `draft`; returns its report and whether earlier timings were used."""
        native = self.native
        start = time.perf_counter()
        builder = native.builder(log)
        network = native.network(builder, self.graph, log)
        config = native.config(
            builder,
            profiles,
            inputs=self.inputs,
            memory_limit_bytes=self.memory_limit_bytes,
            steps=self.progress,
        )
        if not native.capabilities.strong_typing:
            hold_types(native.module, network, config, self.types)
        kept = native.load_timing_cache(config, self.timing_cache)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise CompileError(
                f"TensorRT {native.version} made no plan: {log.reason}",
                value=[p.length for p in profiles],
                limit=_limit(self.memory_limit_bytes),
                remedy="raise the memory limit, or lower engine.max_batch_tokens",
            )
        seconds = time.perf_counter() - start
        native.save_timing_cache(config, self.timing_cache)
        content = memoryview(plan)
        draft.write_bytes(content)
        listing, source, memory = self._listing(plan, log)
        report = PlanReport(
            path=target,
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            profiles=profiles,
            seconds=seconds,
            counts=listing.counts(self.sites),
            listing=listing,
            listing_from=source,
            profile_memory=memory,
            activation_bytes=_said(_ACTIVATIONS, log),
        )
        return report, kept

    def _listing(
        self, plan: Any, log: BuildLog
    ) -> tuple[LayerListing, Literal["inspector", "log"], tuple[int, ...] | None]:
        inspection = self.native.inspect(plan, log)
        if inspection is None:
            return parse_log(log.lines), "log", None
        return parse_inspector(inspection.layers), "inspector", inspection.profile_memory


def _check(profiles: Sequence[ProfileShape]) -> None:
    wrong = [shape for shape in profiles if shape.length < 1 or shape.batch_max < 1]
    lengths = [shape.length for shape in profiles]
    if not profiles or wrong or len(set(lengths)) < len(lengths):
        raise CompileError(
            "profiles that cannot be",
            value=wrong or lengths,
            limit="at least one, each length once, batch from 1 on",
            remedy="give one profile for each bucket",
        )


def _limit(memory: int | None) -> str:
    return "no memory limit" if memory is None else f"{memory / 2**20:.0f} MiB of workspace"


def _said(pattern: re.Pattern[str], log: BuildLog) -> int | None:
    found = [int(match[1]) for line in log.lines if (match := pattern.search(line))]
    return found[-1] if found else None
