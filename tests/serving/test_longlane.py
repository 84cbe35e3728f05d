"""The long lane's worker: bounded, all or none, merged by bucket, refused at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from builders.serving.entry.config import BucketRoute
from builders.serving.entry.group import Group, Row
from builders.serving.entry.longlane import LongLane
from builders.serving.entry.ticket import Ticket
from tests.serving.parts import PAD, PATIENCE_S, Mailbox, eventually, expected, lane, route, ticket, vectors

# A lost wake-up or answer shows as a hang.
pytestmark = pytest.mark.timeout(60)

LONG, LONGER = route(16, "long", batch=3), route(32, "long", batch=2)


class Lane:
    """Computes groups when it is let, and notes them."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, group: Group) -> None:
        self.groups.append(group)
        self.begun.release()
        assert self.gate.wait(PATIENCE_S)
        group.deliver(lane(group.route, group.tensors(PAD)))

    def wait_for_a_group(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def run() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.gate.set()


@pytest.fixture
def lanes(run: Lane) -> Iterator[list[LongLane]]:
    """Closes what a test makes, after its gate was opened."""
    made: list[LongLane] = []
    yield made
    run.gate.set()
    for each in made:
        each.close(PATIENCE_S)


def texts(own: Ticket, bucket: BucketRoute = LONG) -> list[tuple[BucketRoute, Row]]:
    return [(bucket, Row(own, index)) for index in range(len(own.tokens))]


def late(count: int, mailbox: Mailbox, length: int = 10) -> Ticket:
    own = ticket(*[length] * count)
    own.late, own.send = True, mailbox
    return own


def opened(lanes: list[LongLane], run: Lane, *, workers: int = 1, bound: int = 10) -> LongLane:
    lanes.append(LongLane(run, workers, bound))
    return lanes[-1]


def test_text_answered_and_nothing_held_afterwards(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run), Mailbox()
    own = late(2, mailbox)
    assert long.offer(texts(own)) is None
    assert long.held == 2
    run.gate.set()
    assert mailbox.expect(1) == [own]
    assert (vectors(own) == expected(own, [LONG])).all()
    assert eventually(lambda: long.held == 0)


def test_request_refused_as_a_whole_when_its_texts_pass_the_bound(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=5), Mailbox()
    assert long.offer(texts(late(3, mailbox))) is None
    refusal = long.offer(texts(late(3, mailbox)))
    assert refusal
    assert refusal.kind == "overloaded"
    assert refusal.message == (
        "the long lane holds 3 texts and cannot take 3 more; limit: 5 (lanes.long.bound); "
        "send long texts more slowly or try again later"
    )
    assert long.held == 3
    assert long.offer(texts(late(2, mailbox))) is None, "what fits the bound exactly is taken"
    assert long.held == 5
    assert long.offer(texts(late(1, mailbox))) is not None
    run.gate.set()
    mailbox.expect(2)
    assert eventually(lambda: long.held == 0)
    assert sum(len(group.rows) for group in run.groups) == 5


def test_request_refused_for_good_when_no_empty_lane_could_take_it(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=2), Mailbox()
    refusal = long.offer(texts(late(3, mailbox)))
    assert refusal
    assert refusal.kind == "invalid", "a client that tries again would never be answered"
    assert "3 texts and windows" in refusal.message
    assert "limit: 2 a request" in refusal.message
    assert long.held == 0


def test_bound_free_again_after_the_texts_were_answered(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=3), Mailbox()
    run.gate.set()
    for number in range(1, 6):
        assert long.offer(texts(late(3, mailbox))) is None
        mailbox.expect(number)
        assert eventually(lambda: long.held == 0)


def test_running_texts_count_against_the_bound(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=1), Mailbox()
    assert long.offer(texts(late(1, mailbox))) is None
    run.wait_for_a_group()
    assert long.offer(texts(late(1, mailbox))) is not None


def test_waiting_texts_of_one_bucket_merged_up_to_its_batch(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=64), Mailbox()
    first = late(1, mailbox)
    long.offer(texts(first))
    run.wait_for_a_group()  # the worker is busy; from here on texts wait
    owners = {}
    for name, bucket in (
        ("a", LONG),
        ("b", LONGER),
        ("c", LONG),
        ("d", LONG),
        ("e", LONG),
        ("f", LONGER),
        ("g", LONGER),
    ):
        owners[name] = late(1, mailbox, bucket.length)
        long.offer(texts(owners[name], bucket))
    run.gate.set()
    mailbox.expect(8)
    names = {id(own): name for name, own in owners.items()} | {id(first): "first"}
    made = [(group.route.length, "".join(names[id(row.ticket)] for row in group.rows)) for group in run.groups]
    # Oldest text first, with what waits for the same bucket (3 and 2 at most); the rest keeps its order.
    assert made == [(16, "first"), (16, "acd"), (32, "bf"), (16, "e"), (32, "g")]


def test_groups_run_at_once_when_there_are_several_workers(lanes: list[LongLane]) -> None:
    meeting, mailbox = threading.Barrier(3), Mailbox()

    def run(group: Group) -> None:
        meeting.wait(PATIENCE_S)
        group.deliver(lane(group.route, group.tensors(PAD)))

    long = LongLane(run, workers=3, bound=64)
    for bucket in (route(16, batch=1), route(32, batch=1), route(64, batch=1)):
        assert long.offer(texts(late(1, mailbox, bucket.length), bucket)) is None
    mailbox.expect(3)
    long.close(PATIENCE_S)


def test_every_ticket_answered_once_when_16_threads_offer(lanes: list[LongLane], run: Lane) -> None:
    run.gate.set()
    long, mailbox = opened(lanes, run, workers=3, bound=40), Mailbox()
    taken: list[Ticket] = []
    refused: list[Ticket] = []
    start = threading.Barrier(16)

    def client(number: int) -> None:
        start.wait(PATIENCE_S)
        for _ in range(20):
            own = late(1 + number % 4, mailbox)
            (taken if long.offer(texts(own, (LONG, LONGER)[number % 2])) is None else refused).append(own)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(taken) + len(refused) == 320
    mailbox.expect(len(taken))
    assert eventually(lambda: long.held == 0)
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, taken))
    assert all(len(group.rows) <= group.route.batch for group in run.groups)


def test_waiting_refused_and_running_finished_when_closed(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run), Mailbox()
    running, waiting = late(1, mailbox), late(2, mailbox)
    long.offer(texts(running))
    run.wait_for_a_group()
    long.offer(texts(waiting))
    closing = threading.Thread(target=long.close, args=(PATIENCE_S,), daemon=True)
    closing.start()
    assert mailbox.expect(1) == [waiting], "the waiting one is refused without waiting for the running one"
    assert waiting.refusal
    assert waiting.refusal.kind == "overloaded"
    assert "shutting down" in waiting.refusal.message
    run.gate.set()
    closing.join(PATIENCE_S)
    assert mailbox.expect(2) == [waiting, running]
    assert running.refusal is None
    assert sum(len(group.rows) for group in run.groups) == 1


def test_offer_refused_after_the_close(run: Lane, lanes: list[LongLane]) -> None:
    long = opened(lanes, run)
    long.close(PATIENCE_S)
    refusal = long.offer(texts(ticket(10)))
    assert refusal
    assert (refusal.kind, "shutting down" in refusal.message) == ("overloaded", True)


def test_threads_end_when_closed(run: Lane) -> None:
    before = set(threading.enumerate())
    long = LongLane(run, workers=4, bound=8)
    own = set(threading.enumerate()) - before
    assert len(own) == 4
    long.close(PATIENCE_S)
    assert not any(thread.is_alive() for thread in own)


def test_close_gives_up_after_its_timeout_when_a_lane_hangs(run: Lane, lanes: list[LongLane]) -> None:
    long = opened(lanes, run)
    long.offer(texts(late(1, Mailbox())))
    run.wait_for_a_group()
    began = time.monotonic()
    long.close(timeout=0.05)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_nothing_held_after_the_close(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run), Mailbox()
    long.offer(texts(late(1, mailbox)))
    run.wait_for_a_group()
    long.offer(texts(late(2, mailbox)))
    closing = threading.Thread(target=long.close, args=(PATIENCE_S,), daemon=True)
    closing.start()
    mailbox.expect(1)
    run.gate.set()
    closing.join(PATIENCE_S)
    assert long.held == 0
