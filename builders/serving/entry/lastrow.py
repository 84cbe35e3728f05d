"""Wakes the queue of a model that cannot do it itself: Triton's own TensorRT backend runs none of our code.

The tokenising process does not see when the bucket model becomes idle (docs/queue.md, "The lost wake-up"). So when it
has been quiet for a moment it sends a row of its own behind what waits, and wakes the queue again and again until that
row is answered: all that was sent before has left the queue then. Each quiet spell after work costs one row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .quiet import QuietWatch

#: Longest pause between two wake-ups of one spell, seconds.
LONGEST_S = 0.032


class LastRow(QuietWatch):
    """Wakes a queue until it is empty, once per quiet spell after work; costs nothing while idle.

    Args:
        wake: sends a wake-up; called from several threads.
        last: sends the row and returns when it has left the queue and was answered.
        quiet_s: seconds without work before they are sent.
        failed: told about an error of either.
        at_once: wake-ups under way at the same time: each is rejected only when its turn comes.
    """

    def __init__(
        self,
        wake: Callable[[], object],
        last: Callable[[], object],
        quiet_s: float,
        failed: Callable[[Exception], None],
        at_once: int,
    ):
        """See the class."""
        self._wake, self._last, self._failed = wake, last, failed
        self._free = threading.BoundedSemaphore(at_once)
        self._pool = ThreadPoolExecutor(at_once + 1, thread_name_prefix="last-row")
        super().__init__(quiet_s, "last-row")

    def close(self) -> None:
        """Stop before the model is unloaded."""
        super().close()
        self._pool.shutdown(wait=True)

    def _spell(self, number: int) -> None:
        row = self._pool.submit(self._tried, self._last)
        row.add_done_callback(self._row_done)
        pause = self._quiet_s
        while not row.done():
            with self._changed:
                if self._closed:
                    return
                self._changed.wait_for(lambda: self._closed or row.done(), timeout=pause)
            pause = min(2 * pause, LONGEST_S)
            if not row.done() and self._free.acquire(blocking=False):
                self._pool.submit(self._tried, self._wake).add_done_callback(lambda _: self._free.release())

    def _row_done(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify()

    def _tried(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # the queue must still be woken next time
            self._failed(error)
