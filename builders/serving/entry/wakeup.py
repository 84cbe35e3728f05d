"""Wakes the entry's own queue when it may have gone to sleep with work in it.

With a queue policy Triton's batcher can sleep up to 500 ms although an instance is idle, until a new request to the
model arrives (docs/queue.md). So, once an instance has been quiet for a moment after real work, the entry sends
itself a request that expires at once: it wakes the batcher and is rejected without reaching an instance.

A request only wakes the batcher when an instance already waits for work, and how long an instance needs to get there
after `execute` returns depends on the machine. So a wake-up that is not rejected soon is followed by another, after
twice the time, until one is rejected or new work comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

#: The batcher looks by itself after this long; a later wake-up would be of no use.
POLL_S = 0.5
#: Wake-ups of one spell at most: 2, 4, 8 … ms add up to more than `POLL_S` before the tenth.
ATTEMPTS = 9


class WakeUp:
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
        self._send, self._quiet, self._failed = send, quiet_s, failed
        self._due: float | None = None
        self._spell = 0
        self._heard = -1
        self._closed = False
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="wake-up")
        self._thread = threading.Thread(target=self._watch, name="wake-up", daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """Work has begun: a wake-up that was due is not needed."""
        with self._changed:
            self._due = None
            self._spell += 1
            self._changed.notify()

    def quiet(self) -> None:
        """Work has ended."""
        with self._changed:
            self._due = time.monotonic() + self._quiet
            self._changed.notify()

    def close(self) -> None:
        """Stop before the model is unloaded: a request to a model on its way out would be an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._is_due():
                    self._changed.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                if self._closed:
                    return
                self._due = None
                spell = self._spell
            self._wake(spell)

    def _wake(self, spell: int) -> None:
        """Send wake-ups until one is rejected as expired, work comes, or the batcher has looked by itself."""
        interval = self._quiet
        for _ in range(ATTEMPTS):
            self._pool.submit(self._try, spell)
            interval *= 2
            with self._changed:
                over = self._changed.wait_for(
                    lambda: self._closed or self._spell != spell or self._heard >= spell, timeout=interval
                )
            if over or interval >= POLL_S:
                return

    def _try(self, spell: int) -> None:
        with self._changed:
            # One that had to wait for a place, while those before it waited behind a backlog. Sent now it would only
            # take the place of the next spell's, and wait in its turn behind what has come since.
            if self._closed or self._spell != spell or self._heard >= spell:
                return
        try:
            heard = self._send()
        except Exception as error:  # the queue must still be woken next time
            self._failed(error)
            return
        if heard:
            with self._changed:
                self._heard = max(self._heard, spell)
                self._changed.notify()

    def _is_due(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due
