"""Metrics: counted from any thread, told to Triton by one, there from the start, and cheap."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from builders.serving.entry.metrics import (
    BATCHES,
    CALLS,
    CANDIDATE_SECONDS,
    DEGRADED,
    FAMILIES,
    IN_FLIGHT,
    REFUSALS,
    TEXTS,
    Publisher,
    Sample,
    Tally,
)
from tests.serving.parts import config, route
from tests.serving.test_ticket import together
from tests.tools.waiting import until

# A lost wake-up shows as a hang.
pytestmark = pytest.mark.timeout(60)

CONFIG = config(route(8), route(32, "long"))


class Metric:
    """Stands for pb_utils' metric; slow enough for two threads to meet in it."""

    inside = most = 0

    def __init__(self) -> None:
        self.value = 0.0
        self.changes = 0
        self.threads: set[str] = set()

    def increment(self, number: float) -> None:
        Metric.inside += 1
        Metric.most = max(Metric.most, Metric.inside)
        before = self.value
        time.sleep(0.0005)
        self.value = before + number
        self.changes += 1
        self.threads.add(threading.current_thread().name)
        Metric.inside -= 1

    def set(self, number: float) -> None:
        self.value = 0.0
        self.increment(number)


class Family:
    """Stands for pb_utils.MetricFamily."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: dict[tuple[tuple[str, str], ...], Metric] = {}

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - the name of pb_utils
        key = tuple(sorted(labels.items()))
        assert key not in self.made, "made twice"
        self.made[key] = Metric()
        return self.made[key]


class Triton:
    """What the publisher made, and the gauges' values."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}
        self.gauges: list[Sample] = []
        self.errors: list[Exception] = []
        self.tally = Tally()

    def make(self, name: str, description: str, kind: str) -> Family:
        assert description
        self.families[name] = Family(kind)
        return self.families[name]

    def publisher(self, interval_s: float = 0.01) -> Publisher:
        identity = ("encode", "3", "encode_0_1")
        return Publisher(self.make, identity, CONFIG, self.tally, lambda: self.gauges, self.errors.append, interval_s)

    def metric(self, name: str, **labels: str) -> Metric:
        return self.families[name].made[tuple(sorted({"model": "encode", "version": "3", **labels}.items()))]


@pytest.fixture
def triton() -> Triton:
    return Triton()


@pytest.fixture
def publisher(triton: Triton) -> Iterator[Publisher]:
    made = triton.publisher()
    made.start()
    yield made
    made.close()


def test_all_metrics_there_at_0_before_the_first_request(triton: Triton) -> None:
    triton.publisher()
    assert set(triton.families) == {family.name for family in FAMILIES}
    # Some hundred of these, and most servers never have a trial.
    assert {name for name, family in triton.families.items() if not family.made} == {CANDIDATE_SECONDS.name}
    assert all(metric.value == 0 for family in triton.families.values() for metric in family.made.values())
    triton.metric(TEXTS.name, lane="short", bucket="8")
    triton.metric(TEXTS.name, lane="long", bucket="32")
    triton.metric(REFUSALS.name, kind="timeout")
    triton.metric(DEGRADED.name, instance="encode_0_1")


def test_names_follow_the_conventions() -> None:
    for family in FAMILIES:
        assert family.name.startswith("encoder_lanes_")
        assert family.name.endswith(("_total", "_bucket")) == (family.kind == "counter"), family.name
        assert family.name == family.name.lower()
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_counts_of_16_threads_add_up_and_only_one_thread_tells_them(triton: Triton, publisher: Publisher) -> None:
    Metric.most = 0

    def work(number: int) -> None:
        for _ in range(50):
            triton.tally.add(BATCHES, 2)
            triton.tally.add_all([(CALLS, 1), (TEXTS, 3)], ("short", "8") if number % 2 else ("long", "32"))

    together(work)
    batches, texts = triton.metric(BATCHES.name), triton.metric(TEXTS.name, lane="long", bucket="32")
    assert until(lambda: (batches.value, texts.value) == (1600, 1200))
    assert Metric.most == 1
    assert batches.threads == texts.threads == {"metrics"}
    assert batches.changes < 100, "many counts are one message"


def test_gauge_set_when_it_changes_and_only_then(triton: Triton) -> None:
    publisher = triton.publisher()
    gauge = triton.metric(IN_FLIGHT.name, lane="short", bucket="8", instance="encode_0_1")
    for value in (3.0, 3.0, 3.0, 0.0, 0.0):
        triton.gauges = [(IN_FLIGHT.name, ("short", "8"), value)]
        publisher.flush()
    assert (gauge.changes, gauge.value) == (2, 0)


def test_last_count_and_the_gauge_behind_it_told_soon_after_the_work(triton: Triton, publisher: Publisher) -> None:
    triton.gauges = [(DEGRADED.name, (), 1.0)]
    triton.tally.add(BATCHES)
    triton.gauges = [(DEGRADED.name, (), 0.0)]
    gauge = triton.metric(DEGRADED.name, instance="encode_0_1")
    assert until(lambda: triton.metric(BATCHES.name).value == 1 and gauge.value == 0)


def test_nothing_told_while_nothing_happens(triton: Triton, publisher: Publisher) -> None:
    asked: list[int] = []

    def gauges() -> list[Sample]:
        asked.append(1)
        return []

    publisher._gauges = gauges
    triton.tally.add(BATCHES)
    assert until(lambda: len(asked) >= 1)
    time.sleep(0.1)
    before = len(asked)
    time.sleep(0.3)
    assert len(asked) == before


def test_error_told_and_the_next_count_all_the_same(triton: Triton, publisher: Publisher) -> None:
    broken = RuntimeError("no such metric")
    metric = triton.metric(BATCHES.name)
    whole, metric.increment = metric.increment, lambda number: (_ for _ in ()).throw(broken)  # type: ignore[method-assign,assignment]
    triton.tally.add(BATCHES)
    assert until(lambda: triton.errors == [broken])
    metric.increment = whole  # type: ignore[method-assign]
    triton.tally.add(BATCHES, 5)
    assert until(lambda: metric.value == 5)


def test_families_kept_alive_by_the_publisher(triton: Triton) -> None:
    publisher = triton.publisher()
    alive = [weakref.ref(family) for family in triton.families.values()]
    triton.families.clear()
    gc.collect()
    assert all(reference() is not None for reference in alive)
    publisher.close()


def test_counting_a_batch_costs_less_than_a_tenth_of_a_millisecond() -> None:
    tally = Tally()
    counts: list[tuple[Any, float]] = [(CALLS, 1), (TEXTS, 32), (BATCHES, 1), (TEXTS, 3), (TEXTS, 0.1)]
    took = []
    for _ in range(200):
        began = time.thread_time()
        for bucket in ("128", "256", "512"):  # what a batch of three buckets counts
            tally.add(TEXTS, 1, ("short", bucket))
            tally.add_all(counts, ("short", bucket))
        tally.add_all(counts[:2])
        took.append(time.thread_time() - began)
    assert sorted(took)[len(took) // 2] < 0.0001


def test_thread_ends_when_closed_also_before_its_start(triton: Triton) -> None:
    before = set(threading.enumerate())
    triton.publisher().close()
    started = Triton().publisher(interval_s=30)
    started.start()
    began = time.monotonic()
    started.close()
    assert time.monotonic() - began < 10
    assert set(threading.enumerate()) <= before


def test_counts_told_before_the_interval_is_over_when_they_are_hurried(triton: Triton) -> None:
    slow = triton.publisher(interval_s=30.0)
    slow.start()
    try:
        triton.tally.add(BATCHES)
        slow.hurry()
        assert until(lambda: triton.metric(BATCHES.name).value == 1)
        triton.tally.add(BATCHES)
        slow.hurry()
        assert until(lambda: triton.metric(BATCHES.name).value == 2)
    finally:
        slow.close()
