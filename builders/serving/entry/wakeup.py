"""Wakes the entry's own queue when it may have gone to sleep with work in it.

With a queue policy Triton's batcher can sleep up to 500 ms although an instance is idle, until a new request to the
model arrives (docs/queue.md). So, once an instance has been quiet for a moment after real work, the entry sends
itself a request that expires at once: it wakes the batcher and is rejected without reaching an instance.

A request only wakes the batcher when an instance already waits for work, and how long an instance needs to get there
after `execute` returns depends on the machine. So a wake-up that is not rejected soon is followed by another, after
twice the time, until one is rejected or new work comes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from .quiet import QuietWatch

#: The batcher looks by itself after this long; a later wake-up would be of no use.
POLL_S = 0.5
#: Wake-ups of one spell at most: 2, 4, 8 … ms add up to more than `POLL_S` before the tenth.
ATTEMPTS = 9


class WakeUp(QuietWatch):
    """Wakes the queue once per quiet spell after work; costs nothing while idle.

    Args:
        send: sends a wake-up and returns True when it was rejected as expired, so that the batcher is awake; False
            when it was refused otherwise. May raise: the error is handed to `failed` and does not end the thread.
            Called from several threads.
        quiet_s: seconds without work before the first one is sent.
        failed: told about an error of `send`.
        at_once: calls of `send` that may wait for their rejection. Triton rejects a wake-up when it comes to it, behind
            all that waits in its level, so a backlog of more batches than this stalls when nothing new comes.
    """

    def __init__(
        self,
        send: Callable[[], bool],
        quiet_s: float,
        failed: Callable[[Exception], None],
        at_once: int = ATTEMPTS,
    ):
        """See the class."""
        self._send, self._failed = send, failed
        self._heard = -1
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="wake-up")
        super().__init__(quiet_s, "wake-up")

    def close(self) -> None:
        """Stop before the model is unloaded."""
        super().close()
        self._pool.shutdown(wait=True)

    def _spell(self, number: int) -> None:
        """Send wake-ups until one is rejected as expired, work comes, or the batcher has looked by itself."""
        interval = self._quiet_s
        for _ in range(ATTEMPTS):
            self._pool.submit(self._try, number)
            interval *= 2
            with self._changed:
                over = self._changed.wait_for(lambda: self._is_over(number), timeout=interval)
            if over or interval >= POLL_S:
                return

    def _is_over(self, number: int) -> bool:
        return self._closed or self._number != number or self._heard >= number

    def _try(self, number: int) -> None:
        with self._changed:
            # One that had to wait for a place, while those before it waited behind a backlog. Sent now it would only
            # take the place of the next spell's, and wait in its turn behind what has come since.
            if self._is_over(number):
                return
        try:
            heard = self._send()
        except Exception as error:  # the queue must still be woken next time
            self._failed(error)
            return
        if heard:
            with self._changed:
                self._heard = max(self._heard, number)
                self._changed.notify()
