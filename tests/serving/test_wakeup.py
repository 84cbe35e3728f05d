"""The wake-up: one per quiet spell, none while busy or idle, never the end of its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from builders.serving.entry.wakeup import WakeUp
from tests.serving.parts import PATIENCE_S
from tests.tools.waiting import until

# A lost wake-up or answer shows as a hang.
pytestmark = pytest.mark.timeout(60)

QUIET_S = 0.02


class Queue:
    """Stands for the entry's own queue: notes wake-ups and answers as told."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.errors: list[Exception] = []
        self.answer: Callable[[], bool] = lambda: True

    def send(self) -> bool:
        self.sent.append(time.monotonic())
        return self.answer()


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def wakeup(queue: Queue) -> Iterator[WakeUp]:
    made = WakeUp(queue.send, QUIET_S, queue.errors.append)
    yield made
    made.close()


def test_nothing_sent_when_there_was_no_work(wakeup: WakeUp, queue: Queue) -> None:
    time.sleep(5 * QUIET_S)
    assert queue.sent == []


def test_sent_once_per_quiet_spell_when_it_is_rejected(wakeup: WakeUp, queue: Queue) -> None:
    for spell in range(1, 4):
        wakeup.busy()
        wakeup.quiet()
        assert until(lambda spell=spell: len(queue.sent) == spell)
        time.sleep(5 * QUIET_S)
        assert len(queue.sent) == spell


def test_sent_only_after_the_quiet_time(wakeup: WakeUp, queue: Queue) -> None:
    began = time.monotonic()
    wakeup.quiet()
    assert until(lambda: bool(queue.sent))
    assert queue.sent[0] - began >= QUIET_S


def test_nothing_sent_while_busy(queue: Queue) -> None:
    wakeup = WakeUp(queue.send, 0.2, queue.errors.append)
    wakeup.quiet()
    wakeup.busy()
    time.sleep(0.5)
    assert queue.sent == []
    wakeup.close()


def test_nothing_sent_between_batches_that_follow_closely(queue: Queue) -> None:
    wakeup = WakeUp(queue.send, 0.2, queue.errors.append)
    for _ in range(30):
        wakeup.busy()
        time.sleep(0.005)
        wakeup.quiet()
        time.sleep(0.005)
    assert queue.sent == []
    assert until(lambda: len(queue.sent) == 1)
    wakeup.close()


def test_sent_again_after_twice_the_time_while_it_is_not_rejected(wakeup: WakeUp, queue: Queue) -> None:
    answers = iter([False, False, True])
    queue.answer = lambda: next(answers)
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 3)
    time.sleep(10 * QUIET_S)
    first, second, third = queue.sent
    # Twice and four times, less what a thread may begin late.
    assert second - first >= 1.5 * QUIET_S
    assert third - second >= 3 * QUIET_S


def test_wake_ups_that_waited_for_a_place_not_sent_when_work_has_come_since(queue: Queue) -> None:
    # As behind a backlog: each is rejected when all before it is served, and holds its place until then.
    served = threading.Event()
    queue.answer = lambda: served.wait(10)
    wakeup = WakeUp(queue.send, QUIET_S, queue.errors.append, at_once=1)
    try:
        for spell in range(1, 5):
            wakeup.quiet()
            assert until(lambda spell=spell: wakeup._pool._work_queue.qsize() >= spell)
            wakeup.busy()
        assert len(queue.sent) == 1
        served.set()
        time.sleep(2 * QUIET_S)
        assert len(queue.sent) == 1
        wakeup.quiet()
        assert until(lambda: len(queue.sent) == 2), "there is a place for the next spell's"
    finally:
        served.set()
        wakeup.close()


def test_sent_again_while_the_queue_sleeps_with_it(wakeup: WakeUp, queue: Queue) -> None:
    awake = threading.Event()

    def answer() -> bool:
        if len(queue.sent) == 3:
            awake.set()
        return awake.wait(PATIENCE_S)

    queue.answer = answer
    wakeup.quiet()
    assert awake.wait(PATIENCE_S), "the third wake-up wakes the queue, and with it the first two"
    time.sleep(10 * QUIET_S)
    assert len(queue.sent) == 3


def test_not_sent_again_once_work_has_begun(wakeup: WakeUp, queue: Queue) -> None:
    queue.answer = lambda: False
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 2)
    wakeup.busy()
    time.sleep(20 * QUIET_S)
    assert len(queue.sent) == 2


def test_given_up_after_the_batcher_has_looked_by_itself(wakeup: WakeUp, queue: Queue) -> None:
    queue.answer = lambda: False
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 5)  # 20, 60, 140, 300, 620 ms after the work
    time.sleep(1.0)  # the sixth would follow after 0.64 s
    assert len(queue.sent) == 5


def test_error_told_and_the_next_spell_woken_all_the_same(wakeup: WakeUp, queue: Queue) -> None:
    broken = RuntimeError("no such model")

    def answer() -> bool:
        if len(queue.sent) == 1:
            raise broken
        return True

    queue.answer = answer
    wakeup.quiet()
    assert until(lambda: queue.errors == [broken])
    wakeup.busy()
    wakeup.quiet()
    assert until(lambda: len(queue.sent) >= 2)
    assert queue.errors == [broken]


def test_threads_end_when_closed(queue: Queue) -> None:
    before = set(threading.enumerate())
    wakeup = WakeUp(queue.send, QUIET_S, queue.errors.append)
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 1)
    own = set(threading.enumerate()) - before
    assert own
    wakeup.close()
    assert not any(thread.is_alive() for thread in own)


def test_close_does_not_wait_for_a_wakeup_that_is_due_later(queue: Queue) -> None:
    wakeup = WakeUp(queue.send, 60, queue.errors.append)
    wakeup.quiet()
    began = time.monotonic()
    wakeup.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    assert queue.sent == []


def test_nothing_sent_after_the_close(queue: Queue) -> None:
    wakeup = WakeUp(queue.send, QUIET_S, queue.errors.append)
    wakeup.close()
    wakeup.quiet()
    time.sleep(5 * QUIET_S)
    assert queue.sent == []


def test_next_spell_woken_in_time_when_the_last_one_was_not_rejected(wakeup: WakeUp, queue: Queue) -> None:
    queue.answer = lambda: False
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 4)  # the fifth would follow after 0.32 s
    wakeup.busy()
    began = time.monotonic()
    wakeup.quiet()
    assert until(lambda: len(queue.sent) == 5)
    assert queue.sent[-1] - began < 0.2


def test_sent_at_the_largest_quiet_time_that_the_settings_take(queue: Queue) -> None:
    wakeup = WakeUp(queue.send, 0.5, queue.errors.append)
    wakeup.quiet()
    time.sleep(0.8)
    wakeup.close()
    assert len(queue.sent) == 1
