"""Wakes the entry's own queue when it may have gone to sleep with work in it.

With a queue policy Triton's batcher can sleep up to 500 ms although an instance is idle, until a new request to the
model arrives (docs/queue.md). So, once an instance has been quiet for a moment after real work, the entry sends
itself a request that expires at once: it wakes the batcher and is rejected without reaching an instance.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class WakeUp:
    """Sends one wake-up per quiet spell after work; costs nothing while idle.

    Args:
        send: sends the wake-up; may raise, the error is handed to `failed` and does not end the thread.
        quiet_s: seconds without work before it is sent.
        failed: told about an error of `send`.
    """

    def __init__(self, send: Callable[[], None], quiet_s: float, failed: Callable[[Exception], None]):
        self._send, self._quiet, self._failed = send, quiet_s, failed
        self._due: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="wake-up", daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """Work has begun: a wake-up that was due is not needed."""
        with self._changed:
            self._due = None

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

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._is_due():
                    self._changed.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                if self._closed:
                    return
                self._due = None
            try:
                self._send()
            except Exception as error:  # noqa: BLE001 - the queue must still be woken next time
                self._failed(error)

    def _is_due(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due
