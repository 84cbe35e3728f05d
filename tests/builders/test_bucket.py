"""Which buckets are served: lengths, lanes, batches, steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.bucket import BucketPlan, plan_buckets
from builders.errors import SettingsError
from builders.settings import DeploySettings, load_settings

ROOT = Path(__file__).parents[2]


def deployment(**document: Any) -> DeploySettings:
    return DeploySettings.model_validate({"model": {"source": "package:any/model"}} | document)


def production() -> BucketPlan:
    return plan_buckets(load_settings(ROOT / "deploy.yaml"), positions=2048, max_tokens=2048)


def test_long_batches_bounded_by_tokens_in_production() -> None:
    assert {bucket.length: bucket.batch for bucket in production().buckets} == {
        128: 32,
        256: 32,
        512: 32,
        1024: 16,
        2048: 8,
    }


def test_lanes_split_at_512_in_production() -> None:
    assert {bucket.length: bucket.lane for bucket in production().buckets} == {
        128: "short",
        256: "short",
        512: "short",
        1024: "long",
        2048: "long",
    }


def test_profiles_numbered_from_0_in_rising_length() -> None:
    assert [(bucket.index, bucket.model) for bucket in production().buckets] == [
        (0, "encoder_128"),
        (1, "encoder_256"),
        (2, "encoder_512"),
        (3, "encoder_1024"),
        (4, "encoder_2048"),
    ]


def test_steps_end_with_the_buckets_own_batch() -> None:
    steps = {bucket.length: bucket.steps for bucket in production().buckets}
    assert steps[512] == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
    assert steps[1024] == (1, 2, 4, 8, 12, 16)
    assert steps[2048] == (1, 2, 4, 8)


def test_batch_added_as_a_step_when_it_is_none() -> None:
    plan = plan_buckets(deployment(lanes={"short": {"batch": 7}}), positions=512, max_tokens=512)
    assert plan.buckets[0].steps == (1, 2, 4, 7)


def test_single_text_batch_when_tokens_allow_no_more() -> None:
    plan = plan_buckets(deployment(engine={"max_batch_tokens": 2048}), positions=2048, max_tokens=2048)
    assert (plan.buckets[-1].batch, plan.buckets[-1].steps) == (1, (1,))


def test_one_text_at_least_when_a_bucket_is_above_the_tokens() -> None:
    plan = plan_buckets(load_settings(ROOT / "deploy.cpu.yaml"), positions=512, max_tokens=512)
    assert {bucket.length: bucket.batch for bucket in plan.buckets} == {16: 8, 32: 8, 64: 4, 128: 2, 256: 1, 512: 1}
    assert {bucket.length: bucket.steps for bucket in plan.buckets}[64] == (1, 2, 4)


def test_late_marked_from_late_from_on_in_the_short_lane_only() -> None:
    plan = plan_buckets(deployment(lanes={"short": {"late_from": 256}}), positions=2048, max_tokens=2048)
    assert [bucket.late for bucket in plan.buckets] == [False, True, True, False, False]
    assert not any(bucket.late for bucket in production().buckets)


def test_buckets_above_the_positions_left_out_with_a_notice() -> None:
    plan = plan_buckets(load_settings(ROOT / "deploy.cpu.yaml"), positions=512, max_tokens=512)
    assert [bucket.length for bucket in plan.buckets] == [16, 32, 64, 128, 256, 512]
    assert plan.left_out == (1024, 2048)
    assert plan.notice == "buckets left out: 1024, 2048 (the model has 512 positions and takes 512 tokens)"


def test_no_notice_when_every_bucket_is_served() -> None:
    assert production().notice is None


def test_buckets_that_no_text_reaches_left_out() -> None:
    plan = plan_buckets(deployment(model={"source": "a", "max_tokens": 200}), positions=2048, max_tokens=200)
    assert [bucket.length for bucket in plan.buckets] == [128, 256]
    assert plan.left_out == (512, 1024, 2048)
    assert "2048 positions and takes 200 tokens" in str(plan.notice)


@pytest.mark.parametrize(
    ("limit", "served"), [(127, [128]), (128, [128]), (129, [128, 256]), (256, [128, 256]), (257, [128, 256, 512])]
)
def test_last_bucket_is_the_first_that_holds_the_longest_text(limit: int, served: list[int]) -> None:
    plan = plan_buckets(deployment(), positions=2048, max_tokens=limit)
    assert [bucket.length for bucket in plan.buckets] == served
    assert plan.max_tokens == limit


def test_model_limit_lowered_to_the_longest_bucket_when_the_user_set_none() -> None:
    plan = plan_buckets(deployment(buckets=[128]), positions=512, max_tokens=512)
    assert plan.max_tokens == 128


def test_notice_when_the_longest_bucket_lowers_the_models_limit() -> None:
    plan = plan_buckets(deployment(buckets=[128]), positions=512, max_tokens=512)
    assert "128" in str(plan.notice)
    assert "512" in str(plan.notice)


def test_no_bucket_within_the_positions_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"\[1024, 2048\]; limit: at most 512 tokens; to do: .*tile_positions"):
        plan_buckets(deployment(buckets=[1024, 2048]), positions=512, max_tokens=512)


def test_users_limit_above_the_longest_usable_bucket_refused_with_both_numbers() -> None:
    chosen = deployment(buckets=[128, 256], model={"source": "a", "max_tokens": 300})
    with pytest.raises(SettingsError, match=r"model\.max_tokens.*: 300; limit: 256 tokens; to do: set .* to 256"):
        plan_buckets(chosen, positions=512, max_tokens=300)


def test_smallest_bucket_chosen_at_each_edge() -> None:
    plan = production()
    lengths = [plan.bucket_of(tokens).length for tokens in (0, 1, 127, 128, 129, 512, 513, 2047, 2048)]
    assert lengths == [128, 128, 128, 128, 256, 512, 1024, 2048, 2048]
    with pytest.raises(ValueError, match="2049 tokens are above the longest bucket, 2048"):
        plan.bucket_of(2049)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.sets(st.integers(1, 3000), min_size=1, max_size=8).map(sorted),
    positions=st.integers(1, 3000),
    wanted=st.integers(1, 3000),
    split=st.integers(1, 3000),
    batch=st.integers(1, 64),
    tokens=st.integers(1, 40000),
)
def test_plan_serves_every_length_within_every_bound(
    lengths: list[int], positions: int, wanted: int, split: int, batch: int, tokens: int
) -> None:
    chosen = deployment(
        buckets=lengths,
        lanes={"short": {"up_to": split, "batch": batch}, "long": {"above": split, "batch": batch}},
        engine={"max_batch": 64, "max_batch_tokens": tokens},
    )
    if lengths[0] > positions:
        with pytest.raises(SettingsError):
            plan_buckets(chosen, positions=positions, max_tokens=wanted)
        return
    plan = plan_buckets(chosen, positions=positions, max_tokens=min(wanted, positions))
    served = [bucket.length for bucket in plan.buckets]
    assert sorted([*served, *plan.left_out]) == lengths
    assert max(served) <= positions
    assert served[-1] >= plan.max_tokens
    assert len(served) == 1 or served[-2] < plan.max_tokens, "the last bucket would never be used"
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.lane == ("short" if bucket.length <= split else "long")
        assert 1 <= bucket.batch <= batch
        assert bucket.batch == 1 or bucket.batch * bucket.length <= tokens
        assert bucket.steps[-1] == bucket.batch
        assert bucket.steps[0] == 1
        assert all(a < b for a, b in pairwise(bucket.steps))
