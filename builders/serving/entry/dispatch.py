"""Who computes a group, and whether its requests are answered with the batch or later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import BucketRoute, EntryConfig
from .errors import LaneError, Refusal
from .group import Group, LaneInputs, Row, groups_of, rows_by_bucket
from .longlane import LongLane
from .ticket import Ticket

LaneCall = Callable[[BucketRoute, LaneInputs], NDArray[np.float32]]


@dataclass(frozen=True)
class Batch:
    """A dynamic batch by bucket, in rising length; `slot`: it holds one of the places for late batches."""

    rows: dict[BucketRoute, list[Row]]
    slot: bool

    def groups(self, answer: str) -> list[Group]:
        """The calls of the buckets that are answered in this way."""
        return [
            group for route, rows in self.rows.items() if route.answer == answer for group in groups_of(route, rows)
        ]


class Dispatcher:
    """Sends the texts of a batch to the lanes.

    Three ways, by the bucket's `answer`: `together` groups are in flight at the same time and waited for; `late`
    groups run beside the next batch, a bounded number of batches of them; `long` texts go to the long lane's worker.

    Args:
        config: the entry's settings.
        call: runs a bucket model: (route, its tensors as `Group.tensors`) to FP32 [b, size] or [b, L, size]; raises
            LaneError. Called from several threads.
    """

    #: Calls of one process in flight of each kind; with more groups than this the rest waits for the first.
    CALLS = 16

    def __init__(self, config: EntryConfig, call: LaneCall):
        """See the class."""
        self._config = config
        self._call = call
        self._pool = ThreadPoolExecutor(self.CALLS, thread_name_prefix="lane-call")
        # A pool of their own: late groups must not hold up the next batch's.
        self._late_pool = ThreadPoolExecutor(self.CALLS, thread_name_prefix="late-call")
        self._late_batches = threading.BoundedSemaphore(config.late_bound)
        self._long = LongLane(self._run, config.long_workers, config.long_bound)

    def route(self, tickets: Iterable[Ticket]) -> Batch:
        """Group the texts by bucket and mark the tickets that are answered late; no text is sent yet."""
        tickets = list(tickets)
        rows = rows_by_bucket(tickets, self._config.buckets)
        for route, own in rows.items():
            if route.answer != "together":
                for row in own:
                    row.ticket.late = True
        has_late = any(route.answer == "late" for route in rows)
        slot = has_late and self._late_batches.acquire(blocking=False)
        if has_late and not slot:
            # This process will have to wait for a slot; nobody of this batch waits with it.
            for ticket in tickets:
                ticket.late = True
        return Batch(rows, slot)

    def run(self, batch: Batch) -> None:
        """Compute what `route` grouped; returns when every ticket that is not late is settled.

        With late groups and no slot free it returns when there is one: the backlog stays in Triton's queue, where
        priority holds.
        """
        # First, since it never waits and a refused request's other texts need no computing then.
        self._offer_long([(route, row) for route, rows in batch.rows.items() if route.answer == "long" for row in rows])
        now, late = batch.groups("together"), batch.groups("late")
        futures = [self._pool.submit(self._run, group) for group in (now if late else now[:-1])]
        if late:
            self._start_late(late, batch.slot)
        elif now:
            # The last group needs no thread of its own; it is the longest one, so nothing waits for a hand-over.
            self._run(now[-1])
        wait(futures)

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

    def _start_late(self, groups: list[Group], slot: bool) -> None:
        if not slot:
            self._late_batches.acquire()
        left = len(groups)
        lock = threading.Lock()

        def finished(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                self._late_batches.release()

        for group in groups:
            self._late_pool.submit(self._run, group).add_done_callback(finished)

    def _run(self, group: Group) -> None:
        """Compute one group and settle its rows, whatever happens."""
        try:
            group = group.without_given_up()
            if not group.rows:
                return
            answers = self._call(group.route, group.tensors(self._config.pad_id, segment=self._config.segment))
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
