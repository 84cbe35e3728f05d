"""The command `profile`: serve a copy of what is published with spans on, load it, say where the time went."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

from builders.bench.rounds import own_processes
from builders.build import BuildResult
from builders.errors import BuilderError
from builders.names import is_entry
from builders.ports import free_ports
from builders.profile.gpu import GpuSampler, GpuUse
from builders.profile.load import Latencies, latencies_of, mixed_plan
from builders.profile.path import PREPARING, Span, path_shares, read_spans
from builders.profile.statistics import ModelStatistics, difference, read_statistics
from builders.profile.timeline import draw_timeline
from builders.profile.verdict import Observed, Verdict, judge
from builders.server import TritonServer
from builders.settings import DeploySettings
from clients.load.report import plain_json
from clients.load.run import Crew
from clients.load.summary import BUSY_LIMIT
from clients.load.target import Target

_METRIC = "encoder_lanes_engine_"


@dataclass(frozen=True)
class Profile:
    """All that a profile found."""

    latencies: Latencies
    statistics: Mapping[str, ModelStatistics]
    path: Mapping[str, Any]
    gpu: GpuUse | None
    engine: Mapping[str, float]
    observed: Observed
    verdict: Verdict
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        """For the file; without the single spans."""
        values = self.latencies.all
        return {
            "requests": len(values),
            "throughput": len(values) / self.latencies.seconds,
            "errors": dict(self.latencies.errors),
            "latency_ms": {
                name: {str(at): float(np.percentile(own, at)) for at in (50, 99)}
                for name, own in {**self.latencies.by_class, "all": values}.items()
                if own
            },
            "models": {name: asdict(row) | {"batch": row.batch} for name, row in self.statistics.items()},
            "path": dict(self.path),
            "gpu": asdict(self.gpu) if self.gpu else None,
            "engine": dict(self.engine),
            "observed": asdict(self.observed),
            "verdict": asdict(self.verdict),
        }


def run_profile(
    built: BuildResult, settings: DeploySettings, folder: Path, progress: Callable[[str], None], *,
    seconds: float, clients: int,
) -> Profile:  # fmt: skip
    """Profile the served version under a closed loop of mixed texts.

    Args:
        built: what is published.
        settings: of the deployment; its objectives are what latency and utilisation are judged by.
        folder: gets profile.json and timeline.png.
        progress: told a line per step.
        seconds: of load.
        clients: requests in flight.

    Raises:
        BuilderError: nothing was answered, or the server does not start.
    """
    with _copy_with_spans(built) as (repository, place):
        progress("starting tritonserver on a copy with spans on")
        server = TritonServer(repository, built.models, ports=free_ports(), drain_models=[built.entry_model])
        with server, Crew(own_processes(clients)) as crew:
            target = Target(server.grpc_url, model=built.entry_model)
            plan = mixed_plan(built.plan.buckets[-1].length, seconds)
            crew.run(target, replace(plan, seconds=min(2.0, seconds / 4)), clients)  # to warm it up
            before = read_statistics(server.http_url, built.models)
            progress(f"{clients} requests in flight for {seconds:g} s")
            with GpuSampler() as sampler:
                records = crew.run(target, plan, clients)
            statistics = difference(before, read_statistics(server.http_url, built.models))
            engine = _engine_metrics(server.metrics_url)
        spans = read_spans(place)
    latencies = latencies_of(records, plan)
    if records.busy > BUSY_LIMIT:
        progress(
            f"the load generator was the limit: a process of it was busy {100 * records.busy:.0f} % of the time; what "
            "looks like a server that waits for data may be one that waits for requests"
        )
    if not latencies.all:
        raise BuilderError("nothing was answered", value=dict(latencies.errors), remedy="offer less, or see the log")
    # Of the load alone, whose start is of the spans' own clock: what came before it warmed the server up.
    spans = [span for span in spans if span.begin >= records.start]
    path = path_shares(spans)
    observed = observe(settings, latencies, statistics, path, sampler.use, engine)
    profile = Profile(latencies, statistics, path, sampler.use, engine, observed, judge(observed), tuple(spans))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(plain_json(profile.to_json()), encoding="utf-8")
    if spans:
        draw_timeline(spans, folder / "timeline.png")
    return profile


def observe(
    settings: DeploySettings,
    latencies: Latencies,
    statistics: Mapping[str, ModelStatistics],
    path: Mapping[str, Any],
    gpu: GpuUse | None,
    engine: Mapping[str, float],
) -> Observed:
    """What the verdict is made of."""
    values = latencies.all
    classes = [own for own in latencies.by_class.values() if own]
    entry = next(row for name, row in statistics.items() if is_entry(name))
    whole = sum(entry.phase_ms.values()) or 1.0
    lanes = [row for name, row in statistics.items() if not is_entry(name) and row.executions]
    busiest = max(lanes, key=lambda row: row.texts, default=None)
    batch = settings.lanes.short.batch
    hits, misses = engine.get("graph_hits_total", 0.0), engine.get("graph_misses_total", 0.0)
    goal = settings.objectives.gpu_utilization
    return Observed(
        p50=float(np.percentile(values, 50)),
        p99=float(np.percentile(values, 99)),
        objective_p99=settings.objectives.p99_ms,
        utilization=gpu.utilization if gpu else path.get("engine_busy"),
        objective_utilization=0.70 if goal is None else goal,
        idle_while_preparing=path.get("idle_while_preparing"),
        preparing=sum(path["entry"].get(name, 0.0) for name in PREPARING) if path else None,
        queue_share=entry.phase_ms["queue"] / whole,
        batch_share=busiest.batch / batch if busiest else None,
        late_allocations=engine.get("late_allocations_total"),
        graph_hit_rate=hits / (hits + misses) if hits + misses else None,
        short_p99=float(np.percentile(classes[0], 99)),
        long_p99=float(np.percentile(classes[-1], 99)),
    )


def lines_of(profile: Profile) -> Iterator[str]:
    """The terminal's table, line by line."""
    seen = profile.observed
    count = len(profile.latencies.all)
    yield (
        f"{count} requests, {count / profile.latencies.seconds:.0f}/s, P50 {seen.p50:.1f} ms, P99 {seen.p99:.1f} ms"
        f"{f', errors {dict(profile.latencies.errors)}' if profile.latencies.errors else ''}"
    )
    yield ""
    yield "a request in the entry, by Triton (ms)   " + ", ".join(
        f"{name} {value:.2f}"
        for model, row in profile.statistics.items()
        if is_entry(model)
        for name, value in row.phase_ms.items()
    )
    if profile.path:
        parts = sorted(profile.path["entry"].items(), key=lambda part: -part[1])
        yield "an entry process, share of its time      " + ", ".join(f"{name} {share:.1%}" for name, share in parts)
        yield (
            f"engines at work {profile.path['engine_busy']:.1%} of the time; idle while texts are prepared "
            f"{profile.path['idle_while_preparing']:.1%}"
        )
        for model, own in profile.path["lanes"].items():
            batch = profile.path["texts_a_batch"].get(model, 0.0)
            queue = profile.statistics[model].phase_ms["queue"] if model in profile.statistics else 0.0
            spent = ", ".join(f"{name} {value:.2f} s" for name, value in sorted(own.items()))
            yield f"{model:13} {batch:5.1f} texts a batch, waiting {queue:.2f} ms; {spent}"
    if profile.gpu is not None:
        yield f"GPU {profile.gpu.utilization:.0%}, {profile.gpu.memory_bytes / 2**20:.0f} MiB at most"
    yield ""
    for kind, reason in zip(profile.verdict.kinds, profile.verdict.reasons, strict=True):
        yield f"bottleneck: {kind}: {reason}"
    for row in profile.verdict.rows:
        yield f"  {row.symptom}: {row.seen}; turn: {row.turn}"


@contextmanager
def _copy_with_spans(built: BuildResult) -> Iterator[tuple[Path, Path]]:
    """A repository of links to the published files whose configurations switch spans on, and the spans' folder."""
    # Beside the repository: links need the same file system.
    place = Path(tempfile.mkdtemp(prefix=".profile-", dir=built.repository.parent))
    try:
        repository, spans = place / "models", place / "spans"
        for model in built.models:
            shutil.copytree(built.repository / model, repository / model, copy_function=_link)
            path = repository / model / "config.pbtxt"
            config = text_format.Parse(path.read_text(encoding="utf-8"), proto.ModelConfig())
            kind = "entry" if is_entry(model) else "lane"
            if kind in config.parameters:
                own = json.loads(config.parameters[kind].string_value) | {"spans": str(spans)}
                config.parameters[kind].string_value = json.dumps(own)
            path.unlink()  # a link to the published one
            path.write_text(text_format.MessageToString(config), encoding="utf-8")
        yield repository, spans
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _engine_metrics(url: str) -> dict[str, float]:
    """The engine's metrics, summed over the lanes; empty where no lane has any."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - our own server
        for line in reply.read().decode().splitlines():
            if line.startswith(_METRIC):
                name = line[len(_METRIC) :].partition("{")[0]
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found
