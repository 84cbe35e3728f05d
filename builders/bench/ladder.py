"""The techniques of the reference case, switched on one after the other, as far as the settings' engine has them.

Each row is the settings file with what comes later still switched off. Buckets come before batches: a batch only grows
from equal shapes. On a CPU a bucket gains above all a process of its own, since the engine there computes no padding
of a lone text; with all buckets several texts run beside each other.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
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
        cold: whether its server comes up without a warm-up, see `cold`.
    """

    variant: Variant
    priorities: bool
    cold: bool


@dataclass(frozen=True)
class _Technique:
    """What one row switches on: names of settings that get the file's own value, or what else it does."""

    name: str
    about: str
    keys: tuple[str, ...] = ()
    """Dotted names of settings."""
    fusion: tuple[str, ...] | None = None
    """Fusion steps that are skipped from now on all the same; None: as before."""
    priorities: bool = False
    warm: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Further settings, which differ from the file's."""


#: What makes positions a table; the other steps merge operators.
_POSITIONS = ("clean", "positions")
_TECHNIQUES = (
    _Technique("batch tokenisation", "requests gathered and tokenised at once", ("entry.batch", "entry.window_ms")),
    _Technique("processes", "tokenising processes beside each other", ("entry.processes",)),
    _Technique("length buckets", "a model of its own for each length, with its queue and its process", ("buckets",)),
    _Technique("dynamic batches", "texts of several requests in one run", ("lanes.short.batch", "lanes.long.batch")),
    _Technique("long lane", "long texts do not block short ones", ("lanes.short.up_to", "lanes.long.above")),
    _Technique("late answers", "the short lane's longer texts do not hold up their batch", ("lanes.short.late_from",)),
)
_INT8 = _Technique(
    "int8",
    "weights and activations in 8 bits, which the file does not ask for; `verify` judges its accuracy",
    overrides={"engine": {"precision": "int8"}},
)


def ladder(settings: DeploySettings, plan: BucketPlan, fusion_steps: tuple[str, ...]) -> list[Rung]:
    """The rows, from everything off to everything on; a technique that the file does not use gets no row.

    The last row is the file as it is, but for its ensembles, and for a row of int8 where a CPU engine does not use it
    already.

    Args:
        settings: the deployment; every row has patient queue timeouts, so that slow rows answer as well.
        plan: its buckets.
        fusion_steps: names of all fusion steps.
    """
    off = _everything_off(settings, plan.buckets[-1].length)
    on_cpu = settings.engine.kind == "onnxruntime"
    about = f"exported graph, one process, no batches, one bucket of {plan.buckets[-1].length}"
    about += ", no warm-up" if on_cpu else ", warmed up for one text"
    rungs = [Rung(Variant("graph alone", about, off, fusion_steps), False, on_cpu)]
    skip, priorities, cold = fusion_steps, False, on_cpu
    for technique in _techniques(settings, fusion_steps):
        own = {key: _value(settings, key) for key in technique.keys}
        changed = {key: value for key, value in own.items() if _value_in(off, key) != value}
        if technique.keys and not changed:
            continue
        for key, value in changed.items():
            off = merge(off, _nested(key, value))
        off = merge(off, technique.overrides)
        skip = skip if technique.fusion is None else technique.fusion
        priorities, cold = priorities or technique.priorities, cold and not technique.warm
        rungs.append(Rung(Variant(f"+ {technique.name}", technique.about, off, skip), priorities, cold))
    return rungs


def _techniques(settings: DeploySettings, fusion_steps: tuple[str, ...]) -> Iterator[_Technique]:
    """All of them, in their order."""
    others = tuple(step for step in fusion_steps if step not in _POSITIONS)
    yield _Technique("position table", "position encodings cut from a table, not computed", fusion=others)
    yield _Technique("fused operators", "Q, K and V, scale and mask, LayerNorm, GELU as one operator each", fusion=())
    yield from _TECHNIQUES
    if settings.engine.kind == "onnxruntime":
        yield _Technique("warm-up", "engines and shared memory used once before traffic", warm=True)
    else:
        yield _Technique("warm-up", "every batch size run before traffic, with its graph", ("engine.batch_steps",))
    yield _Technique("priorities", "interactive requests first", priorities=True)
    if _has_int8(settings):
        yield _INT8


def not_in_table(settings: DeploySettings) -> list[tuple[str, str]]:
    """Techniques of the reference case that the table cannot show: name, why and where they are shown."""
    overload = "show past the maximum alone: docs/reliability.md, tests/measurements"
    if settings.engine.kind == "onnxruntime":
        gpu = "a CPU has no device to copy to or to launch kernels on: docs/gpu.md, `make bench-gpu`"
    else:
        gpu = "are switched in the Python engine: docs/gpu.md, `make bench-gpu`"
    return [
        ("pinned memory, asynchronous and merged copies, CUDA graphs, memory pool", gpu),
        ("queue timeout, small batches under backlog", overload),
    ]


def _everything_off(settings: DeploySettings, longest: int) -> dict[str, Any]:
    """Nothing of the file's techniques. `engine.max_batch_tokens` stays: with batches of 1 it bounds nothing."""
    short, long = settings.lanes.short, settings.lanes.long
    off = merge(
        dict(PATIENT),
        {
            "buckets": (longest,),
            "lanes": {
                "short": {"up_to": max(longest, short.up_to), "batch": 1, "late_from": None},
                "long": {"above": max(longest, long.above), "batch": 1},
            },
            "entry": {"processes": 1, "batch": 1, "window_ms": 0.0},
            # They serve callers of their own, and take memory.
            "ensembles": {"buckets": ()},
        },
    )
    return off if settings.engine.kind == "onnxruntime" else merge(off, {"engine": {"batch_steps": (1,)}})


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
