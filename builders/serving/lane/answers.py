"""The thread that answers batches in the order in which they were started, while the next one is being started."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

Answer = Callable[[Any, "Exception | None"], None]
"""Hands one batch's rows (or what failed) to its requests."""


class Answers:
    """Collects batches in a thread of its own.

    Args:
        collect: waits for a batch and gives its rows; raises what failed.
        give_up: told about an answer that could not be given: its client is gone, say.
    """

    def __init__(self, collect: Callable[[Any], Any], give_up: Callable[[Exception], None]):
        """See the class."""
        self._collect, self._give_up = collect, give_up
        self._waiting: queue.SimpleQueue[tuple[Any, Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lane-answers", daemon=True)
        self._thread.start()

    def put(self, pending: Any, answer: Answer) -> None:
        """Let `answer` be called when the batch is done."""
        self._waiting.put((pending, answer))

    def close(self) -> None:
        """Answer what is under way, then end."""
        self._waiting.put(None)
        self._thread.join(timeout=120)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            pending, answer = item
            rows, failure = None, None
            try:
                rows = self._collect(pending)
            except Exception as error:  # of this batch; the next one may be whole
                failure = error
            try:
                answer(rows, failure)
            except Exception as error:
                self._give_up(error)


def slices(sizes: Sequence[int]) -> list[slice]:
    """The rows of each request in its batch."""
    begin, found = 0, []
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += size
    return found
