"""What a profile's load holds, and what is made of its records."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from builders.profile.load import SHARES, latencies_of, mixed_plan
from clients.load.plan import Request
from clients.load.records import Records


@pytest.mark.parametrize("longest", [8, 64, 2048])
def test_texts_fall_into_three_classes_up_to_the_longest_bucket(longest: int) -> None:
    plan = mixed_plan(longest, 3.0)
    counts = Counter(request.kind for request in plan.requests)
    names = [f"up to {most}" for most in (max(4, longest // 4), max(6, longest // 2), longest)]
    assert [counts[name] / len(plan.requests) for name in names] == pytest.approx(SHARES, abs=0.05)
    for request in plan.requests:
        assert request.tokens == len(request.text.split()) + 2 <= int(request.kind.rpartition(" ")[2])
    assert (plan.seconds, mixed_plan(longest, 3.0)) == (3.0, plan)


def test_latencies_are_those_of_the_answered_by_class_and_errors_have_their_words() -> None:
    plan, records = mixed_plan(64, 3.0), Records(said={"Overloaded": "the queue is full"})
    for kind, milliseconds, status in (
        ("up to 64", 90.0, "ok"),
        ("up to 16", 10.0, "ok"),
        ("up to 16", 30.0, "ok"),
        ("up to 32", 9000.0, "Overloaded"),
    ):
        records.add(Request(0.0, "a", kind, 0, 3), 1.0, 1.0, 1.0 + milliseconds / 1000, 3, status)
    found = latencies_of(records, plan)
    assert list(found.by_class) == ["up to 16", "up to 32", "up to 64"], "the shortest first"
    assert [found.by_class[name] for name in found.by_class] == [
        pytest.approx([10.0, 30.0]), [], pytest.approx([90.0]),
    ]  # fmt: skip
    assert found.errors == {"Overloaded: the queue is full": 1}
    assert found.seconds == pytest.approx(1.09)


def test_a_profile_needs_no_package_that_the_product_has_not() -> None:
    measuring = {"psutil", "ruamel", "matplotlib", "jinja2", "torch", "transformers"}
    loaded = "{name.partition('.')[0] for name in sys.modules}"
    script = f"import sys, builders.profile.run; print({loaded} & {measuring!r})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "set()\n", ended.stderr
