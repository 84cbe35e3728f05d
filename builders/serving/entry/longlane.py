"""The long lane's worker: takes long texts off a batch's hands, so that its short ones never wait for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .config import BucketRoute
from .errors import Refusal
from .group import Group, Row

_LOG = logging.getLogger(__name__)


class LongLane:
    """A bounded queue of long texts and the threads that carry them to the bucket models.

    A worker takes the oldest text and with it whatever else waits for the same bucket, up to the bucket's batch.

    Args:
        run: computes a group and settles its rows; must not raise.
        workers: threads.
        bound: texts held at most, waiting or running.
    """

    def __init__(self, run: Callable[[Group], None], workers: int, bound: int):
        """See the class."""
        self._run = run
        self._bound = bound
        self._waiting: deque[tuple[BucketRoute, Row]] = deque()
        self._held = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"long-lane-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, texts: list[tuple[BucketRoute, Row]]) -> Refusal | None:
        """Take the long texts of one request, all or none.

        Returns:
            None when they were taken, else the refusal of their request.
        """
        with self._changed:
            if self._closed:
                return Refusal("overloaded", "the server is shutting down; send the request to another one")
            if len(texts) > self._bound:
                # Trying again would not help. Windows are counted one by one (truncate='chunk').
                return Refusal(
                    "invalid",
                    f"the request has {len(texts)} texts and windows for the long lane; limit: {self._bound} a request "
                    "(lanes.long.bound); send fewer or shorter texts at once",
                )
            if self._held + len(texts) > self._bound:
                return Refusal(
                    "overloaded",
                    f"the long lane holds {self._held} texts and cannot take {len(texts)} more; limit: {self._bound} "
                    "(lanes.long.bound); send long texts more slowly or try again later",
                )
            self._held += len(texts)
            self._waiting.extend(texts)
            self._changed.notify(len(texts))
        return None

    @property
    def held(self) -> int:
        """Texts waiting or running."""
        return self._held

    def close(self, timeout: float | None = None) -> None:
        """Refuse what still waits, let what runs finish, end the threads."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._held -= len(waiting)
            self._changed.notify_all()
        for route, row in waiting:
            Group(route, (row,)).fail(Refusal("overloaded", "the server is shutting down; send the request again"))
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                group = self._next_group()
            try:
                self._run(group)
            except Exception:  # the lane must work on for everybody else
                _LOG.exception("a group of the long lane failed")
            finally:
                with self._changed:
                    self._held -= len(group.rows)

    def _next_group(self) -> Group:
        route, first = self._waiting.popleft()
        rows, others = [first], deque[tuple[BucketRoute, Row]]()
        while self._waiting:
            item = self._waiting.popleft()
            if item[0] == route and len(rows) < route.batch:
                rows.append(item[1])
            else:
                others.append(item)
        self._waiting = others
        return Group(route, tuple(rows))
