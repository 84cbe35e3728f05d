"""What a model did when: spans on the machine's one clock, written beside each other by all its processes.

Copied into the entry's and the lanes' packages alike. Off, it costs one look at an attribute per span.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path

LIMIT = 200_000
"""Spans that one process writes; later ones are dropped and counted."""
_WRITE_S = 0.5


class Spans:
    """Records of (name, begin, end, texts), in seconds of CLOCK_MONOTONIC, which all processes of a machine share.

    Args:
        folder: where `MODEL-PID.jsonl` is written; None: nothing is recorded.
        model: name of the model.
    """

    def __init__(self, folder: str | None, model: str):
        """See the class."""
        self.on = bool(folder)
        self._waiting: deque[tuple[str, float, float, int]] = deque()
        self._written = 0
        self._stop = threading.Event()
        if folder:
            path = Path(folder) / f"{model}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._thread = threading.Thread(target=self._work, args=(path,), name="spans", daemon=True)
            self._thread.start()

    def now(self) -> float:
        """The clock, seconds; 0 when nothing is recorded."""
        return time.monotonic() if self.on else 0.0

    def add(self, name: str, begin: float, texts: int = 0, end: float | None = None) -> float:
        """Record a span from `begin` to now (or to `end`); returns its end, where the next one begins."""
        if not self.on:
            return 0.0
        end = time.monotonic() if end is None else end
        self._waiting.append((name, begin, end, texts))
        return end

    def close(self) -> None:
        """Write what is left."""
        if self.on:
            self._stop.set()
            self._thread.join(timeout=5)

    def _work(self, path: Path) -> None:
        with path.open("a", encoding="utf-8") as file:
            last = False
            while True:
                while self._waiting:
                    span = self._waiting.popleft()
                    if self._written < LIMIT:
                        file.write(json.dumps(span) + "\n")
                    self._written += 1
                file.flush()
                if last:
                    return
                last = self._stop.wait(_WRITE_S)
