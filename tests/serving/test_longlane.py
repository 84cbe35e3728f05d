"""The long lane's worker: bounded, all or none, in the order of the levels, merged by bucket, refused at the end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from builders.serving.entry.config import BucketRoute, Level
from builders.serving.entry.group import Group, Row
from builders.serving.entry.longlane import LongLane, LongRules
from builders.serving.entry.ticket import Ticket
from tests.serving.parts import PAD, PATIENCE_S, Mailbox, expected, lane, route, ticket, vectors
from tests.tools.waiting import until

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


def late(count: int, mailbox: Mailbox, length: int = 10, level: Level = "interactive") -> Ticket:
    own = ticket(*[length] * count, level=level)
    own.late, own.send = True, mailbox
    return own


def rules(bound: int, *, interactive_s: float = 600, background_s: float = 600, every: int = 5) -> LongRules:
    return LongRules(bound, {"interactive": 1000 * interactive_s, "background": 1000 * background_s}, every)


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(lanes: list[LongLane], run: Lane, *, workers: int = 1, bound: int = 10, **order: Any) -> LongLane:
    lanes.append(LongLane(run, workers, rules(bound, **order)))
    return lanes[-1]


def run_names(run: Lane, owners: dict[str, Ticket]) -> list[str]:
    """The groups that were run, each as the names of its tickets."""
    names = {id(own): name for name, own in owners.items()}
    return ["".join(names[id(row.ticket)] for row in group.rows) for group in run.groups]


def test_text_answered_and_nothing_held_afterwards(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run), Mailbox()
    own = late(2, mailbox)
    assert long.offer(texts(own)) is None
    assert long.held == 2
    run.gate.set()
    assert mailbox.expect(1) == [own]
    assert (vectors(own) == expected(own, [LONG])).all()
    assert until(lambda: long.held == 0)


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
    assert until(lambda: long.held == 0)
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
        assert until(lambda: long.held == 0)


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

    long = LongLane(run, 3, rules(64))
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
    assert until(lambda: long.held == 0)
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
    refusal = long.offer(texts(ticket(10, level="interactive")))
    assert refusal
    assert (refusal.kind, "shutting down" in refusal.message) == ("overloaded", True)


def test_threads_end_when_closed(run: Lane) -> None:
    before = set(threading.enumerate())
    long = LongLane(run, 4, rules(8))
    own = set(threading.enumerate()) - before
    assert len(own) == 5, "four workers and the timeouts'"
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


# The two levels


def filled(long: LongLane, run: Lane, mailbox: Mailbox, order: str, bucket: BucketRoute = LONG) -> dict[str, Ticket]:
    """One text each, in this order, while the worker is busy: capitals interactive, the others background."""
    owners = {"_": late(1, mailbox)}
    long.offer(texts(owners["_"]))
    run.wait_for_a_group()
    for name in order:
        owners[name] = late(1, mailbox, bucket.length, "interactive" if name.isupper() else "background")
        assert long.offer(texts(owners[name], bucket)) is None
    return owners


def test_interactive_taken_first_when_background_came_before(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=64), Mailbox()
    owners = filled(long, run, mailbox, "abcdABCD")
    run.gate.set()
    mailbox.expect(len(owners))
    assert run_names(run, owners) == ["_", "ABC", "D", "abc", "d"]


def test_background_taken_every_fifth_time_when_interactive_never_ends(run: Lane, lanes: list[LongLane]) -> None:
    one = route(16, "long", batch=1)
    long, mailbox = opened(lanes, run, bound=64), Mailbox()
    owners = filled(long, run, mailbox, "abcABCDEFGHIJ", one)
    run.gate.set()
    mailbox.expect(len(owners))
    assert "".join(run_names(run, owners)) == "_ABCDaEFGHbIJc"


def test_turns_not_counted_when_no_background_waits(run: Lane, lanes: list[LongLane]) -> None:
    one = route(16, "long", batch=1)
    long, mailbox = opened(lanes, run, bound=64, every=2), Mailbox()
    first = filled(long, run, mailbox, "ABCDEF", one)
    run.gate.set()
    mailbox.expect(7)
    for _ in "ABCDEF":
        run.wait_for_a_group()
    assert "".join(run_names(run, first)) == "_ABCDEF"
    run.groups.clear()
    run.gate.clear()
    second = filled(long, run, mailbox, "aAB", one)
    run.gate.set()
    mailbox.expect(11)
    assert "".join(run_names(run, second)) == "_AaB", "background waits for one interactive text, not for none"


def test_background_holds_half_the_bound_and_interactive_all_of_it(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=8), Mailbox()
    for _ in range(4):
        assert long.offer(texts(late(1, mailbox, level="background"))) is None
    refusal = long.offer(texts(late(1, mailbox, level="background")))
    assert refusal
    assert refusal.kind == "overloaded"
    assert refusal.message == (
        "the long lane holds 4 background texts and cannot take 1 more; limit: 4, half of lanes.long.bound; send long "
        "texts more slowly, try again later, or send class=interactive with what somebody waits for"
    )
    assert (long.held_by("background"), long.held_by("interactive")) == (4, 0)
    assert long.offer(texts(late(4, mailbox))) is None
    assert long.offer(texts(late(1, mailbox))) is not None
    assert (long.held_by("background"), long.held_by("interactive"), long.held) == (4, 4, 8)
    run.gate.set()
    mailbox.expect(5)
    assert until(lambda: long.held == 0)


def test_interactive_fills_the_whole_bound_when_it_is_alone(run: Lane, lanes: list[LongLane]) -> None:
    long = opened(lanes, run, bound=8)
    assert long.offer(texts(late(8, Mailbox()))) is None


def test_background_request_larger_than_half_taken_only_when_it_is_alone(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, bound=8), Mailbox()
    assert long.offer(texts(late(7, mailbox, level="background"))) is None
    assert long.offer(texts(late(1, mailbox, level="background"))) is not None
    run.gate.set()
    mailbox.expect(1)
    assert until(lambda: long.held == 0)
    assert long.offer(texts(late(9, mailbox, level="background"))) is not None, "more than the bound is never taken"


# Timeouts


@pytest.mark.parametrize(("level", "other"), [("interactive", "background"), ("background", "interactive")])
def test_text_refused_in_time_when_it_waits_too_long_behind_a_busy_worker(
    level: Level, other: Level, run: Lane, lanes: list[LongLane]
) -> None:
    long, mailbox = opened(lanes, run, **{f"{level}_s": 0.2}), Mailbox()
    running = late(1, mailbox, level=level)
    long.offer(texts(running))
    run.wait_for_a_group()
    waiting, patient = late(2, mailbox, level=level), late(1, mailbox, level=other)
    began = time.monotonic()
    long.offer(texts(waiting))
    long.offer(texts(patient))
    assert mailbox.expect(1) == [waiting]
    assert 0.2 <= time.monotonic() - began < 2
    assert waiting.refusal
    assert waiting.refusal.kind == "timeout"
    assert re.fullmatch(
        r"Request timeout expired in the long lane: it waited \d+ ms; limit: 200 ms "
        rf"\(entry\.{level}\.timeout_ms\); try again after a pause, or send fewer long texts",
        waiting.refusal.message,
    )
    assert long.held == 2
    run.gate.set()
    mailbox.expect(3)
    assert running.refusal is None, "what runs is finished, however long it takes"
    assert patient.refusal is None
    assert sum(len(group.rows) for group in run.groups) == 2


def test_expired_text_never_computed_when_the_worker_comes_before_the_watch(run: Lane) -> None:
    clock, mailbox = Clock(), Mailbox()
    long = LongLane(run, 1, rules(10, interactive_s=5), clock)
    first, old, new = late(1, mailbox), late(1, mailbox), late(1, mailbox)
    long.offer(texts(first))
    run.wait_for_a_group()
    long.offer(texts(old))
    clock.now += 4
    long.offer(texts(new))
    clock.now += 2  # the watch sleeps five real seconds from the first offer on
    run.gate.set()
    mailbox.expect(3)
    long.close(PATIENCE_S)
    assert (old.refusal or new.refusal) is old.refusal is not None
    assert "it waited 6000 ms; limit: 5000 ms" in old.refusal.message
    assert [id(row.ticket) for group in run.groups for row in group.rows] == [id(first), id(new)]


def test_request_answered_once_when_a_part_of_it_expires_and_a_part_runs(run: Lane, lanes: list[LongLane]) -> None:
    long, mailbox = opened(lanes, run, interactive_s=0.1), Mailbox()
    own = late(5, mailbox)
    long.offer(texts(own))  # three run, two wait
    run.wait_for_a_group()
    assert until(lambda: long.held == 3)
    assert not mailbox.sent, "a lane still works on it"
    run.gate.set()
    assert mailbox.expect(1) == [own]
    assert own.refusal
    assert own.refusal.kind == "timeout"
    assert until(lambda: long.held == 0)


def test_cancelled_text_not_computed_when_its_client_left_while_it_waited(lanes: list[LongLane]) -> None:
    computed: list[int] = []
    gate, mailbox, gone = threading.Event(), Mailbox(), threading.Event()

    def compute(group: Group) -> None:
        assert gate.wait(PATIENCE_S)
        group = group.without_given_up()
        computed.extend(len(row.ids) for row in group.rows)
        group.deliver(lane(group.route, group.tensors(PAD)))

    long = LongLane(compute, 1, rules(10))
    lanes.append(long)
    first, left = late(1, mailbox, 10), late(1, mailbox, 11)
    left.cancelled = gone.is_set
    long.offer(texts(first))
    long.offer(texts(left))
    gone.set()
    gate.set()
    mailbox.expect(2)
    assert left.refusal
    assert left.refusal.kind == "cancelled"
    assert computed == [10]
