"""config.pbtxt of every model, written through Triton's own proto, never as strings put together.

Field meanings: model_config.proto of triton-inference-server/common. What is odd here is odd because of
docs/queue.md: the queue policy sits on the entry alone, the lanes carry none.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

from builders.bucket import Bucket, BucketPlan, plan_buckets, plan_built
from builders.contract import Contract
from builders.ensembles import ensemble_config, ensemble_lengths, queued_config, tokenize_config
from builders.entry_parameters import entry_parameters
from builders.errors import ManifestError, SettingsError
from builders.manifest import Manifest, Output, Requests, output_of, read_manifest, requests_of
from builders.names import is_lane, is_of_ensemble
from builders.queue_policy import set_queue_policy
from builders.settings import DeploySettings
from builders.source import EncoderSource
from builders.state import served_now
from builders.tasks import Task

HEADER = "# Rendered from the deployment's settings; `make render` overwrites it.\n"

_STREAM_PRIORITY = {
    "max": proto.ModelOptimizationPolicy.PRIORITY_MAX,
    "min": proto.ModelOptimizationPolicy.PRIORITY_MIN,
    "default": proto.ModelOptimizationPolicy.PRIORITY_DEFAULT,
}


@dataclass(frozen=True)
class VersionFacts:
    """What a configuration takes from the version that it serves; everything else is in the settings.

    Attributes:
        task: what the model answers.
        output: the lanes' output.
        requests: what a request may ask.
        pad_id: padding token.
        plan: the buckets.
        ensembles: lengths of the buckets that have an ensemble.
    """

    task: Task
    output: Output
    requests: Requests
    pad_id: int
    plan: BucketPlan
    ensembles: tuple[int, ...] = ()

    @property
    def contract(self) -> Contract:
        """The lanes' tensors."""
        return Contract(self.output.name, self.output.size, self.output.per_token, self.requests.segment)


def facts_of_source(settings: DeploySettings, source: EncoderSource) -> VersionFacts:
    """The facts of a version that would be built now."""
    task, plan = source.task, bucket_plan(settings, source)
    ensembles = ensemble_lengths(settings, task, plan)
    return VersionFacts(task.name, output_of(task), requests_of(task), source.pad_id, plan, ensembles)


def facts_of_manifest(settings: DeploySettings, manifest: Manifest) -> VersionFacts:
    """The facts of a version that was published, perhaps with other settings.

    Raises:
        ManifestError: its engines are of another kind than the settings serve.
    """
    if manifest.engine != settings.engine.kind:
        raise ManifestError(
            "the version's engines are of another kind than engine.kind",
            value=manifest.engine,
            limit=settings.engine.kind,
            remedy="serve it with the settings it was built with, or make build-engines",
        )
    plan = plan_built(settings, manifest.buckets, positions=manifest.positions, max_tokens=manifest.max_tokens)
    return VersionFacts(manifest.task, manifest.output, manifest.requests, manifest.pad_id, plan, manifest.ensembles)


def render_configs(settings: DeploySettings, source: EncoderSource, versions: tuple[int, ...] = (1,)) -> dict[str, str]:
    """The text of every config.pbtxt, as for a version built now.

    Args:
        settings: the deployment.
        source: the model, for its output size and its limits.
        versions: the versions that are served.

    Returns:
        Model name to text, the lanes in rising length, the ensembles' steps, the ensembles, then the entry.
    """
    facts = facts_of_source(settings, source)
    return _render(settings, dict.fromkeys(versions, facts), facts, versions)


def render_versions(settings: DeploySettings, lanes: Mapping[int, VersionFacts], served: int) -> dict[str, str]:
    """The text of every config.pbtxt with the lanes of several versions and the entry of one.

    Args:
        settings: the deployment.
        lanes: the versions whose lanes are loaded, the served one among them. The lanes' texts depend on the set
            alone, so that changing `served` leaves the lanes as they are.
        served: the version that the entry serves.

    Returns:
        As `render_configs`.

    Raises:
        SettingsError: one configuration cannot serve a lane of all these versions.
    """
    return _render(settings, lanes, lanes[served], (served,))


def render_repository(settings: DeploySettings, source: EncoderSource) -> dict[str, str]:
    """The text of every config.pbtxt for what is served of a model: its state, else its newest version, else 1.

    Raises:
        StateError, ManifestError: the state file or the manifest of a served version cannot be used.
    """
    state = served_now(settings.repository, settings.name)
    if state is None:
        return render_configs(settings, source)
    manifests = {version: read_manifest(settings.repository, version, settings.name) for version in state.lanes}
    lanes = {version: facts_of_manifest(settings, manifest) for version, manifest in manifests.items()}
    return render_versions(settings, lanes, state.served)


def _render(
    settings: DeploySettings, lanes: Mapping[int, VersionFacts], entry: VersionFacts, served: tuple[int, ...]
) -> dict[str, str]:
    configs = []
    for length in sorted({bucket.length for facts in lanes.values() for bucket in facts.plan.buckets}):
        there, _, lane = _shared_lane(settings, lanes, length)
        lane.version_policy.specific.versions.extend(there)
        configs.append(lane)
    for length in sorted({length for facts in lanes.values() for length in facts.ensembles}):
        with_one = {version: facts for version, facts in lanes.items() if length in facts.ensembles}
        there, bucket, lane = _shared_lane(settings, with_one, length)
        contract = next(iter(there.values())).contract
        for step in (tokenize_config(settings, bucket, contract, there), queued_config(settings, bucket, lane)):
            step.version_policy.specific.versions.extend(there)
            configs.append(step)
    for length in entry.ensembles:
        _, bucket, _ = _shared_lane(settings, lanes, length)
        config = ensemble_config(settings, bucket, entry, _answer_tensor(entry), max(served))
        config.version_policy.specific.versions.append(max(served))
        configs.append(config)
    config = _entry_config(settings, entry)
    config.version_policy.specific.versions.extend(served)
    configs.append(config)
    return {config.name: HEADER + text_format.MessageToString(config) for config in configs}


def _shared_lane(
    settings: DeploySettings, lanes: Mapping[int, VersionFacts], length: int
) -> tuple[dict[int, VersionFacts], Bucket, Any]:
    """The versions that have a bucket, the bucket as all of them can serve it, and its configuration."""
    there = {
        version: (facts, bucket)
        for version, facts in sorted(lanes.items())
        for bucket in facts.plan.buckets
        if bucket.length == length
    }
    bucket = _common(settings, {v: b for v, (_, b) in there.items()})
    contract = _common_contract(bucket, {v: facts.contract for v, (facts, _) in there.items()})
    return {v: facts for v, (facts, _) in there.items()}, bucket, _lane_config(settings, contract, bucket)


def _common(settings: DeploySettings, buckets: Mapping[int, Bucket]) -> Bucket:
    """The bucket as every version of it can serve it: a model's versions share its configuration."""
    smallest = min(buckets.values(), key=lambda bucket: bucket.batch)
    profiles = {version: bucket.index for version, bucket in buckets.items()}
    if settings.engine.kind == "tensorrt" and len(set(profiles.values())) > 1:
        raise SettingsError(
            f"{smallest.model} has another profile in each version, and a model's versions share one configuration",
            value=profiles, remedy="build with the buckets of the served version, or promote with --offline --drop-old",
        )  # fmt: skip
    return replace(smallest, index=max(profiles.values()))


def _common_contract(bucket: Bucket, contracts: Mapping[int, Contract]) -> Contract:
    """The tensors that every version of a lane has."""
    first = next(iter(contracts.values()))
    if any(contract != first for contract in contracts.values()):
        raise SettingsError(
            f"{bucket.model} has other tensors in each version, and a model's versions share one configuration",
            value={version: f"{c.inputs} -> {c.output} {c.dims(bucket.length)}" for version, c in contracts.items()},
            remedy="promote with --offline --drop-old, or serve the other model under a name of its own",
        )  # fmt: skip
    return first


def bucket_plan(settings: DeploySettings, source: EncoderSource) -> BucketPlan:
    """The buckets of this deployment with this model."""
    return plan_buckets(settings, positions=source.positions, max_tokens=source.max_tokens)


def write_configs(repository: Path, configs: dict[str, str], name: str = "") -> list[Path]:
    """Write what differs, remove configurations of buckets of the model `name` that are gone.

    Triton compares modification times, so an unchanged file is not touched: a later `load` then reloads nothing.

    Returns:
        The files that were written or removed.
    """
    changed = []
    for model, text in configs.items():
        path = repository / model / "config.pbtxt"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        write_config(path, text)
        changed.append(path)
    for path in stale_configs(repository, set(configs), name):
        path.unlink()
        # Triton refuses a repository with a model folder that holds nothing it knows.
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        changed.append(path)
    return changed


def write_config(path: Path, text: str) -> None:
    """Write one config.pbtxt whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(".config.pbtxt.new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def stale_configs(repository: Path, kept: Set[str], name: str = "") -> Iterator[Path]:
    """Configurations of the model's lanes and ensembles other than `kept`.

    What belongs to another model is not ours to remove.
    """
    found = sorted(repository.glob("encoder_*/config.pbtxt"))
    # The ensembles before their steps: a step that is gone takes its ensemble with it.
    for kind in ("tokenize", "ensemble"):
        found = [*sorted(repository.glob(f"{kind}_*/config.pbtxt")), *found]
    for path in found:
        model = path.parent.name
        if (is_lane(model, name) or is_of_ensemble(model, name)) and model not in kept:
            yield path


def _entry_config(settings: DeploySettings, facts: VersionFacts) -> Any:
    entry = settings.entry
    config = proto.ModelConfig(name=settings.entry_model, backend="python", max_batch_size=entry.batch)
    # Always [n, 1], which the entry checks. Declared free, since Triton then wakes its batcher for every request; with
    # a fixed shape it can leave a request asleep behind one that expired in the window (docs/queue.md).
    config.input.add(name="TEXT", data_type=proto.TYPE_STRING, dims=[-1])
    if facts.requests.pair != "none":
        # Optional for Triton even where the task needs it: the entry's refusal says more than Triton's.
        config.input.add(name="TEXT_PAIR", data_type=proto.TYPE_STRING, dims=[-1], optional=True)
    config.output.add(**_answer_tensor(facts))
    config.output.add(name="TOKENS", data_type=proto.TYPE_INT32, dims=[1])
    config.output.add(name="CUT", data_type=proto.TYPE_INT32, dims=[1])
    config.instance_group.add(count=entry.processes, kind=proto.ModelInstanceGroup.KIND_CPU)
    set_queue_policy(config, entry)
    for name, value in entry_parameters(settings, facts).items():
        config.parameters[name].string_value = value
    # The first request to a process is slow in Triton itself; the entry answers this one without the lanes, and takes
    # it as the sign that it may call them (entry/warmup.py).
    warm = config.model_warmup.add(name="first_request", batch_size=1, count=1)
    warm.inputs["TEXT"].CopyFrom(proto.ModelWarmup.Input(data_type=proto.TYPE_STRING, dims=[1], zero_data=True))
    return config


def _answer_tensor(facts: VersionFacts) -> dict[str, Any]:
    """The entry's own output; JSON where there is no fixed number of numbers."""
    if facts.output.per_token:
        name = "ENTITIES" if facts.task == "tagging" else "ANSWERS"
        return {"name": name, "data_type": proto.TYPE_STRING, "dims": [1]}
    # Free where a request may choose the size.
    size = -1 if facts.requests.dimensions else facts.output.size
    return {"name": facts.output.name, "data_type": proto.TYPE_FP32, "dims": [size]}


def _lane_config(settings: DeploySettings, contract: Contract, bucket: Bucket) -> Any:
    lane = settings.lanes.short if bucket.lane == "short" else settings.lanes.long
    config = proto.ModelConfig(name=bucket.model, max_batch_size=bucket.batch)
    for name, width in contract.widths(bucket.length).items():
        config.input.add(name=name, data_type=proto.TYPE_INT32, dims=[width])
    config.output.add(name=contract.output, data_type=proto.TYPE_FP32, dims=contract.dims(bucket.length))
    # No priorities, timeouts or queue size here: any of them turns Triton's pre-fetching off (docs/queue.md).
    config.dynamic_batching.SetInParent()
    config.dynamic_batching.max_queue_delay_microseconds = round(lane.window_ms * 1000)
    if settings.engine.kind == "tensorrt" and settings.engine.backend == "native":
        _native_engine(config, settings, contract, bucket, lane.stream_priority)
    else:
        _python_engine(config, settings, contract, bucket, threads=lane.threads, nice=lane.nice)
    return config


def _python_engine(
    config: Any, settings: DeploySettings, contract: Contract, bucket: Bucket, *, threads: int, nice: int
) -> None:
    """This project's own engine: ONNX Runtime on the CPU, or the bucket's plan on each GPU."""
    config.backend = "python"
    on_gpu = settings.engine.kind == "tensorrt"
    if on_gpu:
        # Input tensors still come in the host's memory (FORCE_CPU_ONLY_INPUT_TENSORS is on unless it is turned off):
        # the engine's own packed copy takes them up. The kind is what tells each instance its GPU.
        config.instance_group.add(count=1, kind=proto.ModelInstanceGroup.KIND_GPU, gpus=settings.engine.gpus)
    else:
        config.instance_group.add(count=1, kind=proto.ModelInstanceGroup.KIND_CPU)
    parameters: dict[str, Any] = {
        "engine": settings.engine.kind,
        "file": "model.plan" if on_gpu else "model.onnx",
        "length": bucket.length,
        "output": contract.output,
        "per_token": contract.per_token,
        "segment": contract.segment,
        "steps": bucket.steps,
        "threads": threads,
        "nice": nice,
    }
    if on_gpu:
        parameters["options"] = {
            "profile": bucket.index,
            "arena_factor": settings.engine.arena_factor,
            "techniques": list(settings.engine.techniques),
        }
    config.parameters["lane"].string_value = json.dumps(parameters)
    # The engine runs every step in `initialize`; what Triton and the process do besides at a first request (50 to
    # 100 ms on two busy cores) is done by a request through Triton alone.
    _add_warm_up(config, contract, bucket.length, (1,))


def _native_engine(
    config: Any, settings: DeploySettings, contract: Contract, bucket: Bucket, stream_priority: str
) -> None:
    """Triton's TensorRT backend: this bucket's profile, a CUDA graph and a warm-up per batch step."""
    config.backend = "tensorrt"
    config.default_model_filename = "model.plan"
    # Without `profile` the backend takes profile 0 alone.
    config.instance_group.add(
        count=1, kind=proto.ModelInstanceGroup.KIND_GPU, gpus=settings.engine.gpus, profile=[str(bucket.index)]
    )
    # The activations of this bucket's profile and not of the largest one. Backends before 25.05 do not know it.
    config.parameters["execution_context_allocation_strategy"].string_value = "ON_PROFILE_CHANGE"
    optimization = config.optimization
    optimization.priority = _STREAM_PRIORITY[stream_priority]
    # output_copy_stream stays off: together with graphs it gave wrong answers (docs/queue.md, "TensorRT").
    optimization.cuda.graphs = True
    for below, step in pairwise((0, *bucket.steps)):
        spec = optimization.cuda.graph_spec.add(batch_size=step)
        spec.graph_lower_bound.batch_size = below + 1
        # The bound is on the batch alone: a longer text in the graph of a shorter one gives wrong answers.
        for shapes in (spec.input, spec.graph_lower_bound.input):
            for name, width in contract.widths(bucket.length).items():
                shapes[name].dim.append(width)
    _add_warm_up(config, contract, bucket.length, bucket.steps)


def _add_warm_up(config: Any, contract: Contract, length: int, steps: tuple[int, ...]) -> None:
    for step in steps:
        warm = config.model_warmup.add(name=f"batch_{step}", batch_size=step, count=1)
        for name, width in contract.widths(length).items():
            zeros = proto.ModelWarmup.Input(data_type=proto.TYPE_INT32, dims=[width], zero_data=True)
            warm.inputs[name].CopyFrom(zeros)
