from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import onnx_ir
import pytest

from builders.errors import BuilderError
from builders.verify.bisect import BisectReport, Cause, bisect
from builders.verify.gate import Gate, GateSettings
from tests.verify.graphs import (
    Edit,
    apply,
    edited,
    freeze_positions,
    narrow_layer_norm,
    raise_channel,
    remake_scale,
    round_fp16,
    runner,
    swap_q_and_k,
    widen_mask,
)

STEPS = [f"s{number}" for number in range(1, 17)]


def search(bad: Callable[[set[str]], bool], steps: Sequence[str] = STEPS) -> BisectReport:
    """The model of these steps is the set of their names."""
    return bisect(steps, set, lambda model: not bad(model))


@pytest.mark.parametrize("step", STEPS)
def test_step_is_named_in_few_builds_when_it_is_bad(step: str) -> None:
    report = search(lambda model: step in model)
    assert report.causes == (Cause((step,)),)
    assert report.monotone
    assert report.builds <= math.log2(len(STEPS)) + 4


def test_builds_grow_with_the_logarithm_when_there_are_many_steps() -> None:
    steps = [f"s{number}" for number in range(1000)]
    report = search(lambda model: "s617" in model, steps)
    assert str(report.causes[0]) == "s617"
    assert report.builds <= 14


def test_both_steps_are_named_when_only_together_bad() -> None:
    report = search(lambda model: {"s3", "s16"} <= model)
    assert [str(cause) for cause in report.causes] == ["s3 and s16 together"]
    assert report.builds <= 3 * math.log2(len(STEPS)) + 4


def test_every_cause_is_named_when_there_are_several() -> None:
    report = search(lambda model: "s4" in model or {"s7", "s16"} <= model or {"s9", "s16"} <= model)
    assert {cause.steps for cause in report.causes} == {("s4",), ("s7", "s16"), ("s9", "s16")}


def test_causes_are_named_when_a_later_step_hides_one() -> None:
    # s2 breaks it, s9 hides that, s12 breaks it again.
    report = search(lambda model: ("s2" in model and "s9" not in model) or "s12" in model)
    assert [str(cause) for cause in report.causes] == ["s2", "s12"]


def test_steps_are_judged_in_turn_when_a_build_passes_with_a_cause_in_it() -> None:
    # s2 hides what s4 breaks, and breaks it together with s8.
    report = search(lambda model: {"s2", "s8"} <= model or ("s4" in model and "s2" not in model), STEPS[:8])
    assert not report.monotone
    assert {cause.steps for cause in report.causes} == {("s2", "s8"), ("s4",)}
    assert {tuple(STEPS[:place]) for place in range(9)} <= {trial.steps for trial in report.trials}
    assert "each was judged in turn" in report.summary()


@pytest.mark.parametrize("seed", range(200))
def test_named_steps_are_at_fault_when_faults_are_random(seed: int) -> None:
    """No order in what passes at all: what is named must still be true."""
    chance = random.Random(seed)
    steps, verdicts = STEPS[:6], {frozenset(): False, frozenset(STEPS[:6]): True}

    def bad(model: set[str]) -> bool:
        return verdicts.setdefault(frozenset(model), chance.random() < 0.4)

    report = search(bad, steps)
    assert report.causes
    assert report.builds <= 2 ** len(steps)
    for cause in report.causes:
        place = steps.index(cause.steps[0])
        prefixes = frozenset(steps[:place]), frozenset(steps[: place + 1])
        starts_to_fail = not verdicts.get(prefixes[0], True) and verdicts.get(prefixes[1], False)
        assert bad(set(cause.steps)) or starts_to_fail


def test_base_is_named_when_it_fails_without_steps() -> None:
    report = search(lambda model: True)
    assert (report.causes, report.base_fails, report.builds) == ((), True, 2)
    assert "without any step" in report.summary()


def test_nothing_is_named_when_all_steps_pass() -> None:
    report = search(lambda model: False)
    assert (report.causes, report.builds) == ((), 1)


def test_build_counts_as_failed_when_it_raises() -> None:
    def build(steps: Sequence[str]) -> set[str]:
        if "s5" in steps:
            raise BuilderError("no sites")
        return set(steps)

    report = bisect(STEPS, build, lambda _: True)
    assert report.causes == (Cause(("s5",)),)
    assert {trial.error for trial in report.trials} == {"", "no sites"}


def test_refused_when_a_step_is_named_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        search(lambda model: False, ["a", "a"])


HARMLESS: dict[str, Edit] = {"noops": lambda model: None, "scale": remake_scale, "gelu": lambda model: None}


@pytest.mark.parametrize(
    ("name", "fault", "named"),
    [
        ("merged-qkv", swap_q_and_k, "merged-qkv"),
        ("layer-norm", narrow_layer_norm, "layer-norm"),
        ("mask", widen_mask, "mask and fp16 together"),
        ("positions", freeze_positions, "positions"),
    ],
)
def test_planted_step_is_named_when_the_gate_fails(
    tiny: onnx_ir.Model, blocks: dict[str, str], settings: GateSettings, name: str, fault: Edit, named: str
) -> None:
    base = edited(tiny, raise_channel) if fault is narrow_layer_norm else tiny
    gate = Gate(runner(base, blocks), settings)
    steps = {**dict(list(HARMLESS.items())[:2]), name: fault, "gelu": HARMLESS["gelu"], "fp16": round_fp16}
    report = bisect(
        list(steps),
        lambda chosen: apply(base, chosen, steps),
        lambda model: gate.run(runner(model, blocks), "fp16").passed,
    )
    assert [str(cause) for cause in report.causes] == [named]
    assert report.builds <= 6 * len(report.causes[0].steps)
