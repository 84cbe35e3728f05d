"""Parameters of the entry's configuration: what its own code reads, and what clients read of the model's limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from builders.bucket import Bucket
from builders.errors import SettingsError

if TYPE_CHECKING:
    from builders.render import VersionFacts
    from builders.settings import DeploySettings, EntrySettings


def entry_parameters(settings: DeploySettings, facts: VersionFacts) -> dict[str, str]:
    """The parameters of the entry: `entry` for its own code, the others for clients, all but `task` JSON.

    Raises:
        SettingsError: model.overlap leaves a window no token of its own.
    """
    entry, plan, model, requests = settings.entry, facts.plan, settings.model, facts.requests
    labels = list(facts.output.labels or ())
    own = {
        "task": facts.task,
        "max_tokens": plan.max_tokens,
        "max_text_bytes": entry.max_text_bytes,
        "max_request_bytes": entry.max_request_bytes,
        "tokenizer_threads": entry.tokenizer_threads,
        "wake_after_ms": entry.wake_after_ms,
        "pad_id": facts.pad_id,
        "output": facts.output.name,
        "size": facts.output.size,
        "labels": labels,
        "pair": requests.pair,
        "segment": requests.segment,
        "normalize": requests.normalize,
        "dimensions": requests.dimensions,
        "prompts": requests.prompts,
        "default_prompt": requests.default_prompt,
        "overlap": _overlap(model.overlap, plan.max_tokens),
        "max_windows": entry.max_windows,
        "aggregation": model.aggregation,
        "max_answer_tokens": model.max_answer_tokens,
        "late_bound": settings.lanes.short.late_bound,
        "long_workers": settings.lanes.long.workers,
        "long_bound": settings.lanes.long.bound,
        "long_background_every": settings.lanes.long.background_every,
        "timeouts_ms": {"interactive": entry.interactive.timeout_ms, "background": entry.background.timeout_ms},
        "degrade": _degrade(entry),
        "buckets": [
            {"length": b.length, "model": b.model, "batch": b.batch, "answer": _answer(b)} for b in plan.buckets
        ],
    }
    limits = {
        "max_tokens": plan.max_tokens,
        "max_texts": entry.batch,
        "max_text_bytes": entry.max_text_bytes,
        "max_request_bytes": entry.max_request_bytes,
        "max_windows": entry.max_windows,
        "buckets": [bucket.length for bucket in plan.buckets],
    }
    # The whole vector is one of the sizes: with others to choose from, the output's shape does not tell it.
    sizes = sorted({*requests.dimensions, facts.output.size}) if facts.task == "embedding" else []
    told = {"labels": labels, "limits": limits, "dimensions": sizes, "prompts": list(requests.prompts)}
    return {"entry": json.dumps(own), "task": facts.task, **{name: json.dumps(value) for name, value in told.items()}}


def _overlap(wanted: int | None, max_tokens: int) -> int:
    """Tokens that two windows share; an eighth of the limit where nothing is wanted."""
    if wanted is None:
        return max_tokens // 8
    # A pair of RoBERTa's has four special tokens, and a window needs one token that the last one had not.
    most = max(0, max_tokens - 5)
    if wanted > most:
        raise SettingsError(
            "model.overlap leaves a window no token of its own", value=wanted,
            limit=f"at most {most} with {max_tokens} tokens a window", remedy="lower model.overlap",
        )  # fmt: skip
    return wanted


def _degrade(entry: EntrySettings) -> dict[str, Any] | None:
    """When batches are small; None: never."""
    degrade = entry.degrade
    if not degrade.enabled:
        return None
    return {
        "above": degrade.above,
        "below": degrade.below,
        "batch": degrade.batch,
        "metrics_url": degrade.metrics_url,
        # Each process looks for itself; together they ask Triton about ten times a second.
        "interval_s": round(min(0.5, max(0.1, 0.1 * entry.processes)), 3),
    }


def _answer(bucket: Bucket) -> str:
    """When the texts of a bucket are answered: with the batch, when they are done, or by the long lane's worker."""
    if bucket.lane == "long":
        return "long"
    return "late" if bucket.late else "together"
