"""Who computes a group, and whether its requests are answered with the batch or later."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import LEVELS, BucketRoute, EntryConfig
from .errors import LaneError, Refusal
from .group import Group, LaneInputs, Row, groups_of, rows_by_bucket
from .longlane import LongLane, LongRules
from .metrics import (
    CALL_SECONDS,
    CALLS,
    FAILED_CALLS,
    IN_FLIGHT,
    LONG_BOUND,
    LONG_HELD,
    PADDED,
    REQUESTS,
    TEXTS,
    TOKENS,
    Family,
    Sample,
    Tally,
)
from .ticket import Ticket
from .tracing import Tracer

LaneCall = Callable[[BucketRoute, LaneInputs], NDArray[np.float32]]


@dataclass(frozen=True)
class Batch:
    """A dynamic batch by bucket.

    Attributes:
        rows: in rising length.
        slot: it holds one of the places for late batches.
        most: texts of a call at most, under backlog; None: as many as the bucket takes.
    """

    rows: dict[BucketRoute, list[Row]]
    slot: bool
    most: int | None = None

    def chains(self, answer: str) -> list[list[Group]]:
        """The calls of the buckets that are answered in this way; those of one chain are to run one after the other.

        Chains run beside each other. Small calls of one bucket are one chain: sent at once, the bucket model's own
        batcher would put them together again.
        """
        chains = []
        for route, rows in self.rows.items():
            if route.answer == answer:
                groups = list(groups_of(route, rows, self.most))
                chains += [groups] if self.most is not None else [[group] for group in groups]
        return chains


class Dispatcher:
    """Sends the texts of a batch to the lanes.

    Three ways, by the bucket's `answer`: `together` groups are in flight at the same time and waited for; `late`
    groups run beside the next batch, a bounded number of batches of them; `long` texts go to the long lane's worker.

    Args:
        config: the entry's settings.
        call: runs a bucket model: (route, its tensors as `Group.tensors`) to FP32 [b, size] or [b, L, size]; raises
            LaneError. Called from several threads.
        tally: counts what is sent.
        tracer: told of each call, for the requests that are traced; None when tracing is off.
        small_batch: asked for each batch: texts of a call at most, or None. With a number every request leaves as soon
            as its own texts are done, not with the batch.
    """

    #: Calls of one process in flight of each kind; with more groups than this the rest waits for the first.
    CALLS = 16

    def __init__(
        self,
        config: EntryConfig,
        call: LaneCall,
        tally: Tally | None = None,
        small_batch: Callable[[], int | None] = lambda: None,
        tracer: Tracer | None = None,
    ):
        """See the class."""
        self._config = config
        self._call = call
        self._tally = tally if tally is not None else Tally()
        self._small_batch = small_batch
        self._tracer = tracer
        self._in_flight: Counter[BucketRoute] = Counter()
        self._in_flight_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.CALLS, thread_name_prefix="lane-call")
        # A pool of their own: late groups must not hold up the next batch's.
        self._late_pool = ThreadPoolExecutor(self.CALLS, thread_name_prefix="late-call")
        self._late_batches = threading.BoundedSemaphore(config.late_bound)
        self._long_rules = LongRules(config.long_bound, config.timeouts_ms, config.long_background_every)
        self._long = LongLane(self._run, config.long_workers, self._long_rules)

    def route(self, tickets: Iterable[Ticket]) -> Batch:
        """Group the texts by bucket and mark the tickets that are answered late; no text is sent yet."""
        tickets = list(tickets)
        rows = rows_by_bucket(tickets, self._config.buckets)
        most = self._small_batch()
        for route, own in rows.items():
            self._tally.add(REQUESTS, len({id(row.ticket) for row in own}), _labels(route))
            if most is not None or route.answer != "together":
                for row in own:
                    row.ticket.late = True
        has_late = any(route.answer == "late" for route in rows)
        slot = has_late and self._late_batches.acquire(blocking=False)
        if has_late and not slot:
            # This process will have to wait for a slot; nobody of this batch waits with it.
            for ticket in tickets:
                ticket.late = True
        return Batch(rows, slot, most)

    def run(self, batch: Batch) -> None:
        """Compute what `route` grouped; returns when the groups of `together` buckets are settled.

        With late groups and no slot free it returns when there is one: the backlog stays in Triton's queue, where
        priority holds.
        """
        # First, since it never waits and a refused request's other texts need no computing then.
        self._offer_long([(route, row) for route, rows in batch.rows.items() if route.answer == "long" for row in rows])
        now, late = batch.chains("together"), batch.chains("late")
        futures = [self._pool.submit(self._run_chain, chain) for chain in (now if late else now[:-1])]
        if late:
            self._start_late(late, batch.slot)
        elif now:
            # The last one needs no thread of its own; it is the longest one, so nothing waits for a hand-over.
            self._run_chain(now[-1])
        wait(futures)

    def gauges(self) -> Iterator[Sample]:
        """What is in flight and held now, as samples for the publisher."""
        for route in self._config.buckets:
            yield IN_FLIGHT.name, _labels(route), float(self._in_flight[route])
        for level in LEVELS:
            yield LONG_HELD.name, (level,), float(self._long.held_by(level))
            yield LONG_BOUND.name, (level,), float(self._long_rules.limit(level))

    def close(self) -> None:
        """Refuse what waits in the long lane and end the threads; no call may follow."""
        self._long.close(timeout=30)
        self._late_pool.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    def _offer_long(self, texts: list[tuple[BucketRoute, Row]]) -> None:
        by_ticket: dict[int, list[tuple[BucketRoute, Row]]] = {}
        for route, row in texts:
            by_ticket.setdefault(id(row.ticket), []).append((route, row))
        for own in by_ticket.values():
            refusal = self._long.offer(own)
            if refusal is not None:
                for route, row in own:
                    Group(route, (row,)).fail(refusal)

    def _start_late(self, chains: list[list[Group]], slot: bool) -> None:
        if not slot:
            self._late_batches.acquire()
        left = len(chains)
        lock = threading.Lock()

        def finished(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                self._late_batches.release()

        for chain in chains:
            self._late_pool.submit(self._run_chain, chain).add_done_callback(finished)

    def _run_chain(self, chain: list[Group]) -> None:
        for group in chain:
            self._run(group)

    def _run(self, group: Group) -> None:
        """Compute one group and settle its rows, whatever happens."""
        try:
            group = group.without_given_up()
            if not group.rows:
                return
            answers = self._counted(group)
            expected = (len(group.rows), *self._config.row_shape(group.route))
            if answers.shape != expected:
                raise LaneError(
                    "failed",
                    f"{group.route.model} answered with shape {answers.shape}; expected {expected}; build the engines "
                    "again",
                )
        except LaneError as error:
            group.fail(Refusal(error.kind, str(error)))
        except Exception as error:  # a lost row would leave its client waiting for ever
            group.fail(Refusal("failed", f"{group.route.model}: {type(error).__name__}: {error}"))
        else:
            group.deliver(answers)

    def _counted(self, group: Group) -> NDArray[np.float32]:
        """The bucket model's answer; what it took and what it cost is counted."""
        route, texts = group.route, len(group.rows)
        inputs = group.tensors(self._config.pad_id, segment=self._config.segment)
        tokens = int(inputs["length"].sum())
        with self._in_flight_lock:
            self._in_flight[route] += texts
        failed, began, began_ns = 1, time.perf_counter(), time.time_ns()
        try:
            answers = self._call(route, inputs)
            failed = 0
            return answers
        finally:
            seconds = time.perf_counter() - began
            with self._in_flight_lock:
                self._in_flight[route] -= texts
            counts: list[tuple[Family, float]] = [
                (CALLS, 1),
                (TEXTS, texts),
                (TOKENS, tokens),
                (PADDED, texts * route.length - tokens),
            ]
            counts.append((CALL_SECONDS, seconds))
            if failed:
                counts.append((FAILED_CALLS, 1))
            self._tally.add_all(counts, _labels(route))
            if self._tracer:
                parents = (row.ticket.parent for row in group.rows)
                about = {"bucket": route.length, "texts": texts, "tokens": tokens}
                error = "the call failed" if failed else None
                self._tracer.add(route.model, parents, began_ns, time.time_ns(), about, error=error, calls=True)


def _labels(route: BucketRoute) -> tuple[str, str]:
    """Values of the labels `lane` and `bucket`."""
    return route.lane, str(route.length)
