"""Waking the queue of a model that cannot: again and again until the last row has left it, and never at rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from builders.serving.entry.lastrow import LastRow
from tests.tools.waiting import until

# A lost wake-up shows as a hang.
pytestmark = pytest.mark.timeout(60)

QUIET_S = 0.01


class Queue:
    """A queue that gives one batch a wake-up, and the last row when nothing is before it."""

    def __init__(self) -> None:
        self.batches = 0
        self.wakes = 0
        self.rows = 0
        self.errors: list[Exception] = []
        self.broken = False
        self._changed = threading.Condition()

    def wake(self) -> None:
        with self._changed:
            self.wakes += 1
            self.batches = max(0, self.batches - 1)
            self._changed.notify_all()
        if self.broken:
            raise RuntimeError("broken")

    def last(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.batches == 0, 20)
            self.rows += 1


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def waking(queue: Queue) -> Iterator[LastRow]:
    made = LastRow(queue.wake, queue.last, QUIET_S, queue.errors.append, 4)
    yield made
    made.close()


def test_queue_woken_until_it_is_empty_when_work_was_sent(queue: Queue, waking: LastRow) -> None:
    queue.batches = 12
    waking.quiet()
    assert until(lambda: queue.rows == 1)
    assert queue.batches == 0
    assert queue.wakes >= 12


def test_nothing_sent_when_nothing_was_tokenised(queue: Queue, waking: LastRow) -> None:
    time.sleep(5 * QUIET_S)
    assert (queue.wakes, queue.rows) == (0, 0)


def test_one_row_a_spell_when_work_comes_without_a_pause(queue: Queue, waking: LastRow) -> None:
    for _ in range(20):
        waking.quiet()
    assert until(lambda: queue.rows == 1)
    time.sleep(5 * QUIET_S)
    assert queue.rows == 1
    waking.quiet()
    assert until(lambda: queue.rows == 2)


def test_next_spell_still_woken_when_a_wake_up_failed(queue: Queue, waking: LastRow) -> None:
    queue.broken, queue.batches = True, 3
    waking.quiet()
    assert until(lambda: queue.rows == 1)
    assert all(str(error) == "broken" for error in queue.errors)
    assert len(queue.errors) >= 3
    queue.broken, queue.batches = False, 2
    waking.quiet()
    assert until(lambda: queue.rows == 2)
