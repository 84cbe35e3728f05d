"""The long lane's worker: takes long texts off a batch's hands, so that its short ones never wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config import LEVELS, BucketRoute, Level
from .errors import Refusal
from .group import Group, Row

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LongRules:
    """What the long lane takes, and in which order.

    Attributes:
        bound: texts held at most, waiting or running. Background texts fill at most half of it, so that an interactive
            one finds room; a background request that is alone may fill more, or a large one could never be served.
        timeouts_ms: longest wait by level.
        background_every: while both levels wait, one group of so many is background's.
    """

    bound: int
    timeouts_ms: Mapping[Level, float]
    background_every: int

    def limit(self, level: Level) -> int:
        """Texts of a level held at most."""
        return self.bound if level == "interactive" else self.bound // 2


@dataclass(frozen=True)
class _Waiting:
    """A text that no worker has taken yet; times in seconds of the lane's clock."""

    route: BucketRoute
    row: Row
    since: float
    until: float


class LongLane:
    """A bounded queue of long texts for each level, and the threads that carry them to the bucket models.

    A worker takes the oldest text of the level whose turn it is, and with it whatever else of that level waits for the
    same bucket, up to the bucket's batch. Interactive has the turn whenever it waits, but for every
    `background_every`-th group. A text that waits longer than its level's timeout is refused, also while all workers
    are busy.

    Args:
        run: computes a group and settles its rows; must not raise.
        workers: threads.
        rules: bound, timeouts, order.
        clock: seconds, rising.
    """

    def __init__(
        self,
        run: Callable[[Group], None],
        workers: int,
        rules: LongRules,
        clock: Callable[[], float] = time.monotonic,
    ):
        """See the class."""
        self._run, self._rules, self._clock = run, rules, clock
        self._waiting: dict[Level, deque[_Waiting]] = {level: deque() for level in LEVELS}
        self._held: dict[Level, int] = dict.fromkeys(LEVELS, 0)
        self._passed_over = 0
        self._closed = False
        lock = threading.Lock()
        self._work_there, self._first_there = threading.Condition(lock), threading.Condition(lock)
        self._lock = lock
        self._threads = [
            threading.Thread(target=self._work, name=f"long-lane-{number}", daemon=True) for number in range(workers)
        ]
        self._threads.append(threading.Thread(target=self._watch_timeouts, name="long-lane-timeouts", daemon=True))
        for thread in self._threads:
            thread.start()

    def offer(self, texts: list[tuple[BucketRoute, Row]]) -> Refusal | None:
        """Take the long texts of one request, all or none.

        Returns:
            None when they were taken, else the refusal of their request.
        """
        level = _level(texts[0][1])
        with self._lock:
            refusal = self._refusal(level, len(texts))
            if refusal is not None:
                return refusal
            self._held[level] += len(texts)
            queue, now = self._waiting[level], self._clock()
            if not queue:
                self._first_there.notify()
            until = now + self._rules.timeouts_ms[level] / 1000
            queue.extend(_Waiting(route, row, now, until) for route, row in texts)
            self._work_there.notify(len(texts))
        return None

    @property
    def held(self) -> int:
        """Texts waiting or running."""
        return sum(self._held.values())

    def held_by(self, level: Level) -> int:
        """Texts of one level, waiting or running."""
        return self._held[level]

    def close(self, timeout: float | None = None) -> None:
        """Refuse what still waits, let what runs finish, end the threads."""
        with self._lock:
            self._closed = True
            waiting = [item for level in LEVELS for item in self._take(level, len(self._waiting[level]))]
            self._work_there.notify_all()
            self._first_there.notify_all()
        for item in waiting:
            Group(item.route, (item.row,)).fail(
                Refusal("overloaded", "the server is shutting down; send the request again")
            )
        for thread in self._threads:
            thread.join(timeout)

    def _refusal(self, level: Level, more: int) -> Refusal | None:
        if self._closed:
            return Refusal("overloaded", "the server is shutting down; send the request to another one")
        if more > self._rules.bound:
            # Trying again would not help. Windows are counted one by one (truncate='chunk').
            return Refusal(
                "invalid",
                f"the request has {more} texts and windows for the long lane; limit: {self._rules.bound} a request "
                "(lanes.long.bound); send fewer or shorter texts at once",
            )
        if self.held + more > self._rules.bound:
            return Refusal(
                "overloaded",
                f"the long lane holds {self.held} texts and cannot take {more} more; limit: {self._rules.bound} "
                "(lanes.long.bound); send long texts more slowly or try again later",
            )
        own, limit = self._held[level], self._rules.limit(level)
        if own and own + more > limit:
            return Refusal(
                "overloaded",
                f"the long lane holds {own} {level} texts and cannot take {more} more; limit: {limit}, half of "
                "lanes.long.bound; send long texts more slowly, try again later, or send class=interactive with what "
                "somebody waits for",
            )
        return None

    def _take(self, level: Level, count: int) -> list[_Waiting]:
        """The oldest waiting texts of a level, which are no longer held."""
        self._held[level] -= count
        return [self._waiting[level].popleft() for _ in range(count)]

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not any(self._waiting.values()):
                    self._work_there.wait()
                if self._closed:
                    return
                expired = self._expired()
                group, level = self._next_group()
            self._refuse(expired)
            if group is None:
                continue
            try:
                self._run(group)
            except Exception:  # the lane must work on for everybody else
                _LOG.exception("a group of the long lane failed")
            finally:
                with self._lock:
                    self._held[level] -= len(group.rows)

    def _next_group(self) -> tuple[Group | None, Level]:
        level = self._turn()
        queue = self._waiting[level]
        if not queue:
            return None, level
        route, rows, others = queue[0].route, list[Row](), deque[_Waiting]()
        for item in queue:
            if item.route == route and len(rows) < route.batch:
                rows.append(item.row)
            else:
                others.append(item)
        self._waiting[level] = others
        return Group(route, tuple(rows)), level

    def _turn(self) -> Level:
        """The level of the next group; counts how often waiting background was passed over."""
        interactive, background = self._waiting["interactive"], self._waiting["background"]
        if not interactive or (background and self._passed_over >= self._rules.background_every - 1):
            self._passed_over = 0
            return "background"
        self._passed_over = self._passed_over + 1 if background else 0
        return "interactive"

    def _watch_timeouts(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                # One timeout a level, so each level's oldest expires first.
                first = min((queue[0].until for queue in self._waiting.values() if queue), default=None)
                wait = None if first is None else first - self._clock()
                if wait is None or wait > 0:
                    self._first_there.wait(wait)
                expired = self._expired()
            self._refuse(expired)

    def _expired(self) -> list[_Waiting]:
        now, expired = self._clock(), list[_Waiting]()
        for level, queue in self._waiting.items():
            expired += self._take(level, sum(item.until <= now for item in queue))
        return expired

    def _refuse(self, expired: list[_Waiting]) -> None:
        for item in expired:
            level = _level(item.row)
            # Begins with Triton's own words for a request that waited too long, by which clients know it.
            message = (
                f"Request timeout expired in the long lane: it waited {1000 * (self._clock() - item.since):.0f} ms; "
                f"limit: {self._rules.timeouts_ms[level]:g} ms (entry.{level}.timeout_ms); try again after a pause, or "
                "send fewer long texts"
            )
            Group(item.route, (item.row,)).fail(Refusal("timeout", message))


def _level(row: Row) -> Level:
    return row.ticket.question.options.level
