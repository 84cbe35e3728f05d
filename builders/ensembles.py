"""Declarative ensembles for callers that know their lengths: `ensemble_<bucket>` beside the entry.

`tokenize_<bucket>` (the entry's tokenising, no queue policy) hands its rows to `encoder_<bucket>_queued` (the engine of
the bucket once more, with a queue of its own, so that `priority` orders the work itself). docs/queue.md says when to
use which. The steps serve every loaded version; the ensemble is pinned to the version that the entry serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as proto

from builders.bucket import Bucket, BucketPlan
from builders.contract import TEXT, TEXT_PAIR, Contract
from builders.entry_parameters import entry_parameters
from builders.errors import SettingsError
from builders.names import ensemble_model, queued_model, tokenize_model
from builders.queue_policy import set_queue_policy
from builders.settings import DeploySettings
from builders.tasks import TaskFacts

if TYPE_CHECKING:
    from builders.render import VersionFacts


def ensemble_lengths(settings: DeploySettings, task: TaskFacts, plan: BucketPlan) -> tuple[int, ...]:
    """The buckets that get an ensemble in a version built now, rising.

    Raises:
        SettingsError: the model has no such bucket, or its task makes one answer of several rows.
    """
    wanted = settings.ensembles.buckets
    if wanted and task.per_token:
        raise SettingsError(
            f"ensembles.buckets: the task {task.name} answers with words, which are made in the entry of what the lane "
            "computed; an ensemble ends with the lane",
            value=list(wanted), limit="embedding, classification or reranking", remedy="leave ensembles.buckets out",
        )  # fmt: skip
    served = [bucket.length for bucket in plan.buckets]
    gone = [length for length in wanted if length not in served]
    if gone:
        raise SettingsError(
            "ensembles.buckets: this model has no such buckets", value=gone, limit=f"some of {served}",
            remedy="correct ensembles.buckets",
        )  # fmt: skip
    return wanted


def tokenize_config(
    settings: DeploySettings, bucket: Bucket, contract: Contract, versions: Mapping[int, VersionFacts]
) -> Any:
    """The tokenising step, with the parameters of each version under a name of its own."""
    config = proto.ModelConfig(
        name=tokenize_model(settings.name, bucket.length), backend="python", max_batch_size=settings.entry.batch
    )
    for text in _texts(next(iter(versions.values()))):
        # Fixed, unlike the entry's: there is no queue to wake, and a request of shape [0, 0] is refused.
        config.input.add(name=text, data_type=proto.TYPE_STRING, dims=[1])
    for name, width in contract.widths(bucket.length).items():
        config.output.add(name=name, data_type=proto.TYPE_INT32, dims=[width])
    for name in ("TOKENS", "CUT"):
        config.output.add(name=name, data_type=proto.TYPE_INT32, dims=[1])
    config.instance_group.add(count=settings.ensembles.processes, kind=proto.ModelInstanceGroup.KIND_CPU)
    # No policy: it never holds a backlog for long, and pre-fetching stays on.
    config.dynamic_batching.SetInParent()
    for version, facts in versions.items():
        config.parameters[f"tokenize_{version}"].string_value = json.dumps(_own(settings, bucket, facts))
    return config


def queued_config(settings: DeploySettings, bucket: Bucket, lane: Any) -> Any:
    """The lane with a queue: as `lane`, but for its name and its batcher.

    Args:
        settings: the deployment.
        bucket: the bucket.
        lane: configuration of its bucket model; not changed.
    """
    config = proto.ModelConfig()
    config.CopyFrom(lane)
    config.name = queued_model(settings.name, bucket.length)
    config.ClearField("dynamic_batching")
    set_queue_policy(config, settings.entry)
    if not _is_native(settings):
        for tensor in config.input:
            # Always 1. Declared free for the reason that the entry's TEXT is (docs/queue.md).
            if tensor.name != "input_ids":
                tensor.dims[:] = [-1]
        config.parameters["wake_after_ms"].string_value = f"{settings.entry.wake_after_ms:g}"
    return config


def ensemble_config(
    settings: DeploySettings, bucket: Bucket, facts: VersionFacts, answer: Mapping[str, Any], version: int
) -> Any:
    """The ensemble itself, pinned to one version of its steps.

    Args:
        settings: the deployment.
        bucket: the bucket.
        facts: of the version.
        answer: name, data_type and dims of the answer.
        version: which one.
    """
    config = proto.ModelConfig(
        name=ensemble_model(settings.name, bucket.length),
        platform="ensemble",
        # A request's texts are one batch of the lane, which nobody cuts.
        max_batch_size=min(settings.entry.batch, bucket.batch),
    )
    texts, contract = _texts(facts), facts.contract
    for text in texts:
        config.input.add(name=text, data_type=proto.TYPE_STRING, dims=[1])
    config.output.add(**answer)
    for name in ("TOKENS", "CUT"):
        config.output.add(name=name, data_type=proto.TYPE_INT32, dims=[1])
    steps = config.ensemble_scheduling.step
    tokenize = steps.add(model_name=tokenize_model(settings.name, bucket.length), model_version=version)
    queued = steps.add(model_name=queued_model(settings.name, bucket.length), model_version=version)
    for text in texts:
        tokenize.input_map[text] = text
    for name in contract.inputs:
        tokenize.output_map[name] = name
        queued.input_map[name] = name
    for name in ("TOKENS", "CUT"):
        tokenize.output_map[name] = name
    queued.output_map[contract.output] = contract.output
    told = entry_parameters(settings, facts)
    limits = json.loads(told["limits"]) | {
        "max_tokens": min(bucket.length, facts.plan.max_tokens),
        "max_texts": config.max_batch_size,
        "buckets": [bucket.length],
    }
    parameters = {"task": told["task"], "labels": told["labels"], "prompts": told["prompts"]}
    for name, value in (parameters | {"limits": json.dumps(limits)}).items():
        config.parameters[name].string_value = value
    return config


def _texts(facts: VersionFacts) -> tuple[str, ...]:
    """The inputs: an ensemble has no optional ones, so a model that may take pairs gets single texts."""
    return (TEXT, TEXT_PAIR) if facts.requests.pair == "required" else (TEXT,)


def _is_native(settings: DeploySettings) -> bool:
    """Whether Triton's own TensorRT backend runs the engines, beside which no code of ours runs."""
    return settings.engine.kind == "tensorrt" and settings.engine.backend == "native"


def _own(settings: DeploySettings, bucket: Bucket, facts: VersionFacts) -> dict[str, Any]:
    """The entry's own parameters, for one bucket and no size but the model's."""
    own: dict[str, Any] = json.loads(entry_parameters(settings, facts)["entry"])
    model = queued_model(settings.name, bucket.length)
    return own | {
        "max_tokens": min(bucket.length, facts.plan.max_tokens),
        "pair": "required" if facts.requests.pair == "required" else "none",
        "dimensions": [],
        "degrade": None,
        # A Python engine wakes its own queue; Triton's TensorRT backend cannot.
        "wake_after_ms": settings.entry.wake_after_ms if _is_native(settings) else 0,
        "buckets": [{"length": bucket.length, "model": model, "batch": bucket.batch, "answer": "together"}],
    }
