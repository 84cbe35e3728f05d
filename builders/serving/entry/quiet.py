"""Notices that work has stopped for a moment: what the wake-ups of a queue (`wakeup`, `lastrow`) begin with."""

from __future__ import annotations

import threading
import time


class QuietWatch:
    """Calls `_spell`, in a thread of its own, once per quiet spell after work; costs nothing while idle.

    Args:
        quiet_s: seconds without work before it is called.
        name: of the thread.
    """

    def __init__(self, quiet_s: float, name: str):
        """A subclass has what its `_spell` needs before it calls this."""
        self._quiet_s = quiet_s
        self._due: float | None = None
        self._number = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """Work has begun: a spell that was due is not needed, and one under way is over."""
        with self._changed:
            self._due = None
            self._number += 1
            self._changed.notify()

    def quiet(self) -> None:
        """Work has ended, or was sent on."""
        with self._changed:
            self._due = time.monotonic() + self._quiet_s
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
                while not self._closed and (self._due is None or time.monotonic() < self._due):
                    self._changed.wait(None if self._due is None else max(0.0, self._due - time.monotonic()))
                if self._closed:
                    return
                self._due = None
                number = self._number
            self._spell(number)

    def _spell(self, number: int) -> None:
        """What a quiet spell asks for.

        Args:
            number: how often work had begun before it; when `_number` has gone on, it is over.
        """
        raise NotImplementedError
