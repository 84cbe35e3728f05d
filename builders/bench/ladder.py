"""The techniques of the reference case, switched on one after the other, as far as the settings' engine has them.

Each row is the settings file with what comes later still switched off; the last row is the file as it is.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from builders.bench.product import PATIENT, Variant, merge
from builders.bucket import BucketPlan
from builders.settings import DeploySettings
from builders.settings.sections import EngineSettings


@dataclass(frozen=True)
class Rung:
    """A row of the table.

    Attributes:
        variant: the settings of the row.
        priorities: whether requests carry their priority.
    """

    variant: Variant
    priorities: bool


@dataclass(frozen=True)
class _Technique:
    """What one row switches on: names of settings that get the file's own value, or what else it does."""

    name: str
    about: str
    keys: tuple[str, ...] = ()
    """Dotted names of settings."""
    fusion: bool = False
    priorities: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, which differ from the file's."""


_TECHNIQUES = (
    _Technique("fused operators", "LayerNorm, GELU, Q/K/V and attention as one operator each", fusion=True),
    _Technique("batch tokenisation", "requests gathered and tokenised at once", ("entry.batch", "entry.window_ms")),
    _Technique("processes", "tokenising processes beside each other", ("entry.processes",)),
    _Technique("dynamic batches", "texts of several requests in one run", ("lanes.short.batch", "lanes.long.batch")),
    _Technique("length buckets", "a text is padded to its own bucket", ("buckets",)),
    _Technique(
        "lanes, late answers",
        "long texts neither block nor hold up short ones",
        ("lanes.short.up_to", "lanes.long.above", "lanes.short.late_from"),
    ),
    _Technique("warm-up", "every batch size run before traffic", ("engine.batch_steps",)),
    _Technique("priorities", "interactive requests first", priorities=True),
)
_INT8 = _Technique("int8", "weights and activations in 8 bits", overrides={"engine": {"precision": "int8"}})


def ladder(settings: DeploySettings, plan: BucketPlan, fusion_steps: tuple[str, ...]) -> list[Rung]:
    """The rows, from everything off to everything on; a technique that the file does not use gets no row.

    Args:
        settings: the deployment; every row has patient queue timeouts, so that slow rows answer as well.
        plan: its buckets.
        fusion_steps: names of all fusion steps.
    """
    off = _everything_off(settings, plan.buckets[-1].length)
    rungs = [
        Rung(Variant("graph alone", "exported graph, one process, no batches, one bucket", off, fusion_steps), False)
    ]
    skip, priorities = fusion_steps, False
    techniques = (*_TECHNIQUES, *([_INT8] if _has_int8(settings) else []))
    for technique in techniques:
        own = {key: _value(settings, key) for key in technique.keys}
        changed = {key: value for key, value in own.items() if _value_in(off, key) != value}
        if technique.keys and not changed:
            continue
        for key, value in changed.items():
            off = merge(off, _nested(key, value))
        off = merge(off, technique.overrides)
        skip = () if technique.fusion else skip
        priorities = priorities or technique.priorities
        rungs.append(Rung(Variant(f"+ {technique.name}", technique.about, off, skip), priorities))
    return rungs


def _everything_off(settings: DeploySettings, longest: int) -> dict[str, Any]:
    return merge(
        dict(PATIENT),
        {
            "buckets": (longest,),
            "lanes": {
                "short": {"up_to": longest, "batch": 1, "late_from": None},
                "long": {"above": longest, "batch": 1},
            },
            "entry": {"processes": 1, "batch": 1, "window_ms": 0.0},
            "engine": {"batch_steps": (1,), "max_batch_tokens": max(longest, settings.engine.max_batch_tokens)},
        },
    )


def _has_int8(settings: DeploySettings) -> bool:
    """Whether this version of the settings knows int8 for the engine, and the file does not use it already."""
    choices = typing.get_args(EngineSettings.model_fields["precision"].annotation)
    return "int8" in choices and settings.engine.kind == "onnxruntime" and settings.engine.precision == "fp32"


def _value(settings: DeploySettings, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _value_in(overrides: Mapping[str, Any], key: str) -> Any:
    value: Any = overrides
    for part in key.split("."):
        value = value[part]
    return value


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)
