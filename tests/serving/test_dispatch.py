"""Who computes what, and when it is answered; every request exactly once, whatever the lanes do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from builders.serving.entry.config import BucketRoute
from builders.serving.entry.dispatch import Dispatcher, LaneCall
from builders.serving.entry.errors import LaneError
from builders.serving.entry.group import LaneInputs, Row
from builders.serving.entry.metrics import Tally
from builders.serving.entry.ticket import Ticket
from tests.serving.parts import DIM, PATIENCE_S, Mailbox, config, expected, lane, route, ticket, vectors
from tests.tools.waiting import until

SHORT, MIDDLE, LATE, LATER, LONG, LONGER = (
    route(4, "together", 3),
    route(8, "together", 2),
    route(16, "late", 2),
    route(24, "late", 3),
    route(32, "long", 3),
    route(48, "long", 2),
)
ALL = (SHORT, MIDDLE, LATE, LATER, LONG, LONGER)
# A lost wake-up or answer shows as a hang.
pytestmark = pytest.mark.timeout(60)

# One request with texts for every way.
REQUESTS = st.lists(st.lists(st.integers(1, 48), min_size=1, max_size=5), max_size=8)


class Lanes:
    """Bucket models that count their calls, may be held back by bucket and may be told to fail."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.marks: list[int] = []
        self.held_back: dict[int, threading.Event] = {}
        self.failing: dict[int, Callable[[], Any]] = {}
        self._lock = threading.Lock()

    def hold(self, bucket: BucketRoute) -> threading.Event:
        self.held_back[bucket.length] = threading.Event()
        return self.held_back[bucket.length]

    def __call__(self, own: BucketRoute, inputs: LaneInputs) -> NDArray[np.float32]:
        with self._lock:
            self.calls[own.length] += 1
            self.marks += inputs["input_ids"][:, 0].tolist()
        if own.length in self.held_back:
            assert self.held_back[own.length].wait(PATIENCE_S)
        if own.length in self.failing:
            return self.failing[own.length]()  # type: ignore[no-any-return]
        return lane(own, inputs)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    for event in made.held_back.values():
        event.set()


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def make(lanes: Lanes) -> Iterator[Callable[..., Dispatcher]]:
    made: list[Dispatcher] = []

    def dispatcher(
        call: LaneCall = lanes,
        *,
        tally: Tally | None = None,
        small_batch: Callable[[], int | None] = lambda: None,
        **bounds: int,
    ) -> Dispatcher:
        made.append(Dispatcher(config(*ALL, **bounds), call, tally, small_batch))
        return made[-1]

    yield dispatcher
    for event in lanes.held_back.values():
        event.set()
    for each in made:
        each.close()


def run(dispatcher: Dispatcher, tickets: list[Ticket], mailbox: Mailbox) -> None:
    """What the entry's execute does with a batch."""
    routed = dispatcher.route(tickets)
    for own in tickets:
        if own.late:
            own.send = mailbox
    dispatcher.run(routed)


def run_beside(dispatcher: Dispatcher, tickets: list[Ticket], mailbox: Mailbox) -> threading.Thread:
    thread = threading.Thread(target=run, args=(dispatcher, tickets, mailbox), daemon=True)
    thread.start()
    return thread


def is_done(own: Ticket) -> bool:
    """Nothing is owed any more (counting down once more would pass zero)."""
    return own._owed == 0


def is_right(own: Ticket) -> bool:
    return own.refusal is None and bool((vectors(own) == expected(own, ALL)).all())


# Any mix of requests


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS)
def test_every_vector_in_its_row_and_every_late_answer_sent_once(requests: list[list[int]]) -> None:
    lanes, mailbox = Lanes(), Mailbox()
    dispatcher = Dispatcher(config(*ALL), lanes)
    tickets = [ticket(*request) for request in requests]
    run(dispatcher, tickets, mailbox)
    for own in tickets:
        assert own.late or is_done(own), "run returned before a ticket that is not late was settled"
    late = [own for own in tickets if own.late]
    assert {id(own) for own in late} == {
        id(own) for own, request in zip(tickets, requests, strict=True) if max(request) > MIDDLE.length
    }
    mailbox.expect(len(late))
    dispatcher.close()
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, late))
    assert all(is_done(own) and is_right(own) for own in tickets)
    assert len(lanes.marks) == len(set(lanes.marks)) == sum(map(len, requests)), "a text was computed twice"


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, broken=st.sets(st.sampled_from(ALL)), kind=st.sampled_from(["raise", "shape", "lane"]))
def test_lane_failures_refuse_only_the_requests_concerned(
    requests: list[list[int]], broken: set[BucketRoute], kind: str
) -> None:
    def fail() -> Any:
        if kind == "raise":
            raise ZeroDivisionError("inside the lane")
        if kind == "lane":
            raise LaneError("overloaded", "not loaded")
        return np.zeros((1, DIM + 1), np.float32)

    lanes, mailbox = Lanes(), Mailbox()
    lanes.failing = {bucket.length: fail for bucket in broken}
    dispatcher = Dispatcher(config(*ALL), lanes)
    tickets = [ticket(*request) for request in requests]
    run(dispatcher, tickets, mailbox)
    late = [own for own in tickets if own.late]
    mailbox.expect(len(late))
    dispatcher.close()
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, late))
    for own, request in zip(tickets, requests, strict=True):
        buckets = {next(bucket for bucket in ALL if length <= bucket.length) for length in request}
        assert is_done(own)
        if buckets & broken:
            assert own.refusal
            assert own.refusal.kind == ("overloaded" if kind == "lane" else "failed")
        else:
            assert is_right(own)


def test_every_ticket_answered_once_when_16_threads_run_batches(
    make: Callable[..., Dispatcher], mailbox: Mailbox
) -> None:
    dispatcher = make(late_bound=4, long_workers=3, long_bound=10_000)
    batches = [
        [ticket(1 + (n * 7 + t) % 48, 1 + (n * 11 + t) % 48, 1 + (n + t) % 8) for n in range(6)] for t in range(16)
    ]
    start = threading.Barrier(16)

    def work(batch: list[Ticket]) -> None:
        start.wait(PATIENCE_S)
        run(dispatcher, batch, mailbox)

    threads = [threading.Thread(target=work, args=(batch,), daemon=True) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    tickets = [own for batch in batches for own in batch]
    late = [own for own in tickets if own.late]
    assert len(late) > 20
    mailbox.expect(len(late))
    assert sorted(map(id, mailbox.sent)) == sorted(map(id, late))
    assert all(is_done(own) and is_right(own) for own in tickets)


def test_nothing_called_when_the_batch_is_empty(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    run(make(), [], mailbox)
    assert not lanes.calls


# Together


def test_groups_of_a_batch_in_flight_at_the_same_time(make: Callable[..., Dispatcher], mailbox: Mailbox) -> None:
    meeting = threading.Barrier(3)

    def call(own: BucketRoute, inputs: LaneInputs) -> NDArray[np.float32]:
        meeting.wait(PATIENCE_S)
        return lane(own, inputs)

    tickets = [ticket(3), ticket(8), ticket(7), ticket(6)]  # one group of 4, two of 8
    run(make(call), tickets, mailbox)
    assert all(is_right(own) for own in tickets)


def test_one_call_a_bucket_when_the_texts_of_many_requests_fit(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    run(make(), [ticket(1), ticket(2, 3), ticket(8)], mailbox)
    assert lanes.calls == {4: 1, 8: 1}


def test_more_groups_than_threads_all_computed(make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox) -> None:
    tickets = [ticket(8) for _ in range(3 * 2 * Dispatcher.CALLS)]
    run(make(), tickets, mailbox)
    assert lanes.calls == {8: 3 * Dispatcher.CALLS}
    assert all(is_right(own) for own in tickets)


def test_wrong_shape_refused_with_both_shapes(make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox) -> None:
    lanes.failing[4] = lambda: np.zeros((1, 5), np.float32)
    own = ticket(3)
    run(make(), [own], mailbox)
    assert own.refusal
    assert own.refusal.message == "encoder_4 answered with shape (1, 5); expected (1, 3); build the engines again"


@pytest.mark.parametrize("task", ["tagging", "answering"])
def test_wrong_shape_per_token_refused_with_both_shapes(task: str) -> None:
    answers: list[NDArray[np.float32]] = [np.ones((2, 4, DIM), np.float32), np.ones((2, 3, DIM), np.float32)]
    for answer in answers:
        dispatcher = Dispatcher(config(*ALL, task=task), lambda *_, answer=answer: answer)
        own = ticket(3, 4)
        run(dispatcher, [own], Mailbox())
        dispatcher.close()
        if answer is answers[0]:
            assert own.refusal is None
            assert [row.shape for row in own.rows] == [(4, DIM)] * 2
        else:
            assert own.refusal
            assert "answered with shape (2, 3, 3); expected (2, 4, 3); build the engines again" in own.refusal.message


def test_lane_gets_the_segments_when_the_model_has_them() -> None:
    seen: list[LaneInputs] = []

    def call(_: BucketRoute, inputs: LaneInputs) -> NDArray[np.float32]:
        seen.append(inputs)
        return np.zeros((len(inputs["length"]), DIM), np.float32)

    dispatcher = Dispatcher(config(*ALL, segment=True), call)
    run(dispatcher, [ticket(3)], Mailbox())
    dispatcher.close()
    assert [inputs["segment_start"].tolist() for inputs in seen] == [[[3]]]


def test_unexpected_error_refused_with_the_model_and_the_error(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    lanes.failing[4] = lambda: {}["no such key"]
    own, other = ticket(3), ticket(8)
    run(make(), [own, other], mailbox)
    assert own.refusal
    assert (own.refusal.kind, own.refusal.message) == ("failed", "encoder_4: KeyError: 'no such key'")
    assert is_right(other)


# Late


def test_run_returns_before_late_groups_are_done(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LATE)
    late, both, short = ticket(16), ticket(3, 12), ticket(3)
    run(make(), [late, both, short], mailbox)
    assert is_right(short)
    assert mailbox.sent == []
    gate.set()
    assert sorted(map(id, mailbox.expect(2))) == sorted(map(id, (late, both)))
    assert is_right(late)
    assert is_right(both)


def test_together_groups_not_held_up_by_late_ones_of_the_same_batch(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    lanes.hold(LATE)
    dispatcher = make(late_bound=1)
    late = [ticket(16) for _ in range(2 * 2 * Dispatcher.CALLS)]  # more groups than threads
    short = [ticket(3) for _ in range(9)]
    run(dispatcher, [*late, *short], mailbox)
    assert all(is_right(own) for own in short)
    assert mailbox.sent == [], "run waited until the held lane gave up"


def test_next_batch_not_held_up_by_late_groups_below_the_bound(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    lanes.hold(LATE)
    dispatcher = make(late_bound=2)
    for _ in range(2):
        short = ticket(3)
        run(dispatcher, [ticket(16), short], mailbox)
        assert is_right(short)
    assert mailbox.sent == []


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_at_most_late_bound_batches_with_late_groups_in_flight(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox, bound: int
) -> None:
    gate = lanes.hold(LATE)
    dispatcher = make(late_bound=bound)
    for _ in range(bound):
        run(dispatcher, [ticket(16, 16, 16)], mailbox)  # two groups each
    waiting = run_beside(dispatcher, [ticket(16)], mailbox)
    waiting.join(0.1)
    assert waiting.is_alive(), "a batch above the bound was let in"
    assert until(lambda: lanes.calls[16] >= 2 * bound)
    assert lanes.calls[16] == 2 * bound
    gate.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    mailbox.expect(bound + 1)


def test_bound_free_again_after_late_groups_failed(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    lanes.failing[16] = lambda: 1 / 0
    dispatcher = make(late_bound=1)
    for number in range(1, 6):
        run(dispatcher, [ticket(16)], mailbox)
        mailbox.expect(number)
    assert all(own.refusal and own.refusal.kind == "failed" for own in mailbox.sent)


def test_batch_without_late_groups_let_through_at_the_bound(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    lanes.hold(LATE)
    dispatcher, short = make(late_bound=1), ticket(3)
    run(dispatcher, [ticket(16)], mailbox)
    thread = run_beside(dispatcher, [short], mailbox)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert is_right(short)
    assert mailbox.sent == [], "run waited until the held lane gave up"


def test_together_groups_computed_while_the_batch_waits_for_the_late_bound(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LATE)
    dispatcher = make(late_bound=1)
    run(dispatcher, [ticket(16)], mailbox)
    waiting = run_beside(dispatcher, [ticket(16), ticket(3)], mailbox)
    time.sleep(0.2)
    computed = lanes.calls[4]
    gate.set()
    waiting.join(PATIENCE_S)
    assert computed == 1


# Long


def test_run_returns_before_long_texts_are_done(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LONG)
    long, short = ticket(32), ticket(3)
    run(make(), [long, short], mailbox)
    assert is_right(short)
    assert mailbox.sent == []
    gate.set()
    assert mailbox.expect(1) == [long]
    assert is_right(long)


def test_request_above_the_long_bound_refused_alone_and_as_a_whole(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LONG)
    dispatcher = make(long_bound=2)
    taken, refused, short = ticket(32, 32), ticket(32, 3, 12), ticket(3)
    run(dispatcher, [taken, refused, short], mailbox)
    assert mailbox.expect(1) == [refused]
    assert refused.refusal
    assert refused.refusal.kind == "overloaded"
    assert "limit: 2 (lanes.long.bound)" in refused.refusal.message
    assert is_right(short)
    assert not {text.ids[0] for text in refused.tokens} & set(lanes.marks), "a text of a refused request was computed"
    gate.set()
    mailbox.expect(2)
    assert is_right(taken)


def test_waiting_long_texts_refused_when_closed(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LONG)
    dispatcher = Dispatcher(config(*ALL), lanes)
    running, waiting = ticket(32), ticket(32)
    run(dispatcher, [running], mailbox)
    assert until(lambda: lanes.calls[32] == 1)
    run(dispatcher, [waiting], mailbox)
    closing = threading.Thread(target=dispatcher.close, daemon=True)
    closing.start()
    assert mailbox.expect(1) == [waiting]
    assert waiting.refusal
    assert "shutting down" in waiting.refusal.message
    gate.set()
    closing.join(PATIENCE_S)
    assert mailbox.sent == [waiting, running]
    assert is_right(running)


def test_threads_end_when_closed(mailbox: Mailbox) -> None:
    before = set(threading.enumerate())
    dispatcher = Dispatcher(config(*ALL), lane)
    run(dispatcher, [ticket(3, 8, 16, 32)], mailbox)
    mailbox.expect(1)
    own = set(threading.enumerate()) - before
    assert len(own) >= 3
    dispatcher.close()
    assert not any(thread.is_alive() for thread in own)


# Cancelled


@pytest.mark.parametrize("length", [3, 16, 32])
def test_rows_of_a_cancelled_request_dropped_before_the_lane(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox, length: int
) -> None:
    gone, kept = ticket(length, length, cancelled=lambda: True), ticket(length)
    run(make(), [gone, kept], mailbox)
    assert until(lambda: is_done(gone) and is_done(kept))
    assert lanes.marks == [kept.tokens[0].ids[0]]
    assert gone.refusal
    assert gone.refusal.kind == "cancelled"
    assert is_right(kept)
    if length > MIDDLE.length:
        mailbox.expect(2)
        assert Counter(map(id, mailbox.sent)) == {id(gone): 1, id(kept): 1}


@pytest.mark.parametrize("length", [3, 16, 32])
def test_lane_not_called_when_all_its_requests_are_cancelled(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox, length: int
) -> None:
    gone = [ticket(length, cancelled=lambda: True) for _ in range(7)]
    run(make(), gone, mailbox)
    assert until(lambda: all(is_done(own) for own in gone))
    assert not lanes.calls


def test_long_text_cancelled_while_it_waits_never_computed(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate, left = lanes.hold(LONG), threading.Event()
    dispatcher = make()
    run(dispatcher, [ticket(32)], mailbox)
    assert until(lambda: lanes.calls[32] == 1)
    gone = ticket(32, cancelled=left.is_set)
    run(dispatcher, [gone], mailbox)
    left.set()
    gate.set()
    mailbox.expect(2)
    assert gone.refusal
    assert gone.refusal.kind == "cancelled"
    assert gone.tokens[0].ids[0] not in lanes.marks


# Errors on the way back


def no_client(_: Ticket) -> None:
    raise RuntimeError("the response sender is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_long_lane_works_on_when_sending_an_answer_fails(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    dispatcher = make()
    broken, next_one = ticket(32), ticket(32)
    routed = dispatcher.route([broken])
    broken.send = no_client
    dispatcher.run(routed)
    assert until(lambda: is_done(broken))
    run(dispatcher, [next_one], mailbox)
    time.sleep(0.2)
    assert mailbox.sent == [next_one]


def test_batch_answered_when_sending_a_refusal_fails(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    dispatcher = make(long_bound=1)
    refused, short = ticket(32, 32), ticket(3)
    routed = dispatcher.route([refused, short])
    refused.send = no_client
    with contextlib.suppress(RuntimeError):  # the question is what becomes of the other request
        dispatcher.run(routed)
    assert is_done(short)
    assert is_right(short)


def test_request_refused_when_asking_for_cancellation_fails(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    def broken() -> bool:
        raise RuntimeError("no such request")

    own, other = ticket(3, cancelled=broken), ticket(8)
    run(make(), [own, other], mailbox)  # the group of `own` runs on a thread of the pool, where the error is lost
    assert is_right(other)
    assert is_done(own)


def test_row_knows_its_text() -> None:
    own = ticket(3, 5)
    assert Row(own, 1).ids is own.tokens[1].ids


# Small batches under backlog


def test_every_request_answered_as_soon_as_its_part_is_done_when_batches_are_small(
    make: Callable[..., Dispatcher], mailbox: Mailbox
) -> None:
    steps = [threading.Event() for _ in range(3)]
    begun = threading.Semaphore(0)
    sizes: list[int] = []

    def call(own: BucketRoute, inputs: LaneInputs) -> NDArray[np.float32]:
        sizes.append(len(inputs["length"]))
        begun.release()
        assert steps[len(sizes) - 1].wait(PATIENCE_S)
        return lane(own, inputs)

    wide = route(4, "together", 8)
    dispatcher = Dispatcher(config(wide, *ALL[1:]), call, small_batch=lambda: 2)
    tickets = [ticket(1 + number % 4) for number in range(6)]
    thread = run_beside(dispatcher, tickets, mailbox)
    for number, step in enumerate(steps, start=1):
        assert begun.acquire(timeout=PATIENCE_S)
        assert len(sizes) == number, "the small batches of a bucket run one after the other"
        step.set()
        mailbox.expect(2 * number)
    thread.join(PATIENCE_S)
    assert sizes == [2, 2, 2]
    assert all((vectors(own) == expected(own, (wide,))).all() for own in tickets)
    dispatcher.close()


def test_interactive_texts_in_the_first_small_batch(make: Callable[..., Dispatcher], lanes: Lanes) -> None:
    box = Mailbox()
    tickets = [ticket(number, level="interactive" if number == 4 else "background") for number in (1, 2, 3, 4)]
    run(make(small_batch=lambda: 1), tickets, box)
    assert [own.tokens[0].ids.size for own in box.sent] == [4, 1, 2, 3]


def test_run_returns_only_when_all_small_batches_are_done(make: Callable[..., Dispatcher], lanes: Lanes) -> None:
    gate, box = lanes.hold(MIDDLE), Mailbox()
    thread = run_beside(make(small_batch=lambda: 1), [ticket(8), ticket(7), ticket(2)], box)
    box.expect(1)
    time.sleep(0.05)
    assert thread.is_alive(), "the backlog stays in Triton's queue"
    gate.set()
    box.expect(3)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_small_batch_asked_for_every_batch(make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox) -> None:
    answers = iter([None, 1, None])
    dispatcher = make(small_batch=lambda: next(answers))
    for calls in (1, 4, 5):
        tickets = [ticket(3), ticket(4), ticket(2)]
        run(dispatcher, tickets, mailbox)
        assert lanes.calls[4] == calls
        assert [own.late for own in tickets] == [calls == 4] * 3
    assert len(mailbox.sent) == 3


@settings(max_examples=25, deadline=None)
@given(requests=REQUESTS, most=st.integers(1, 3))
def test_every_request_answered_once_when_batches_are_small(requests: list[list[int]], most: int) -> None:
    lanes, box = Lanes(), Mailbox()
    dispatcher = Dispatcher(config(*ALL), lanes, small_batch=lambda: most)
    tickets = [ticket(*request) for request in requests]
    run(dispatcher, tickets, box)
    box.expect(len(tickets))
    dispatcher.close()
    assert sorted(map(id, box.sent)) == sorted(map(id, tickets))
    assert all(is_done(own) and is_right(own) for own in tickets)


# Metrics


def test_requests_texts_tokens_and_padding_counted_by_lane_and_bucket(
    make: Callable[..., Dispatcher], mailbox: Mailbox
) -> None:
    tally = Tally()
    run(make(tally=tally), [ticket(1, 3), ticket(2), ticket(40)], mailbox)
    mailbox.expect(1)
    counts = tally.taken()
    short, long = ("short", "4"), ("long", "48")
    names = ("requests", "texts", "calls", "tokens", "padded_tokens")
    assert [counts[f"encoder_lanes_{name}_total", short] for name in names] == [2, 3, 1, 6, 6]
    assert [counts[f"encoder_lanes_{name}_total", long] for name in names] == [1, 1, 1, 40, 8]
    assert counts["encoder_lanes_call_seconds_total", short] > 0
    assert ("encoder_lanes_failed_calls_total", short) not in counts


def test_failed_call_counted_and_nothing_left_in_flight(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    def fail() -> Any:
        raise LaneError("failed", "no")

    tally = Tally()
    lanes.failing[4] = fail
    dispatcher = make(tally=tally)
    run(dispatcher, [ticket(3)], mailbox)
    counts = tally.taken()
    assert counts["encoder_lanes_failed_calls_total", ("short", "4")] == 1
    assert counts["encoder_lanes_calls_total", ("short", "4")] == 1
    assert all(value == 0 for name, _, value in dispatcher.gauges() if "in_flight" in name)


def test_gauges_tell_what_is_in_flight_and_held(
    make: Callable[..., Dispatcher], lanes: Lanes, mailbox: Mailbox
) -> None:
    gate = lanes.hold(LONG)
    dispatcher = make(long_bound=10)
    run(dispatcher, [ticket(30, 31, 32, 29)], mailbox)
    assert until(lambda: lanes.calls[LONG.length] == 1)
    run(dispatcher, [ticket(48, level="interactive")], mailbox)

    def gauges() -> dict[tuple[str, tuple[str, ...]], float]:
        return {(name.removeprefix("encoder_lanes_"), labels): value for name, labels, value in dispatcher.gauges()}

    held = gauges()
    assert held["long_held_texts", ("background",)] == 4
    assert held["long_held_texts", ("interactive",)] == 1
    assert held["long_bound_texts", ("background",)] == 5
    assert held["long_bound_texts", ("interactive",)] == 10
    assert held["in_flight_texts", ("long", "32")] == 3
    gate.set()
    mailbox.expect(2)
    assert until(lambda: not any(v for (name, _), v in gauges().items() if "bound" not in name))
