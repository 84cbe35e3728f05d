"""Counters: never raised by two threads at once, and their family kept alive."""

from __future__ import annotations

import gc
import time
import weakref

from builders.serving.entry.metrics import Counter
from tests.serving.test_ticket import together


class Metric:
    """Stands for pb_utils' metric; slow enough for two threads to meet in it."""

    inside = most = 0

    def __init__(self) -> None:
        self.total = 0.0

    def increment(self, number: float) -> None:
        Metric.inside += 1
        Metric.most = max(Metric.most, Metric.inside)
        before = self.total
        time.sleep(0.0005)
        self.total = before + number
        Metric.inside -= 1


class Family:
    """Stands for pb_utils.MetricFamily."""

    def __init__(self) -> None:
        self.made: list[tuple[dict[str, str], Metric]] = []

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802 - the name of pb_utils
        self.made.append((labels, Metric()))
        return self.made[-1][1]


def test_two_threads_never_inside_at_once_whatever_the_counter() -> None:
    family = Family()
    counters = [Counter(family, {"model": str(number)}) for number in range(2)]

    def work(number: int) -> None:
        for _ in range(5):
            counters[number % 2].add(2)

    together(work)
    assert Metric.most == 1
    assert [metric.total for _, metric in family.made] == [80, 80]


def test_counter_raised_by_one_when_no_number_is_given() -> None:
    family = Family()
    Counter(family, {"model": "encode"}).add()
    ((labels, metric),) = family.made
    assert (labels, metric.total) == ({"model": "encode"}, 1)


def test_family_kept_alive_by_its_counter() -> None:
    family = Family()
    alive, counter = weakref.ref(family), Counter(family, {})
    del family
    gc.collect()
    assert alive() is not None
    counter.add()
