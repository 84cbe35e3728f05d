"""The log file of one server: opened for it, followed while it runs, asked for the reason after its end."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from builders.model_processes import ModelProcesses, death_notice
from builders.triton_log import ServerEvent, explain, parse_log_line

_POLL_S = 0.1
_WATCH_S = 2.0
_log = logging.getLogger(__name__)


class ServerLog:
    """What a server says, as it says it, and what is noticed of its model processes.

    Args:
        path: the file, appended to; None makes a temporary one when it is opened.
        gpu: False drops the errors and warnings that every machine without GPU gives.
        on_event: called from the thread of `follow` for each event; dropped after its first exception.
        watch: False leaves dead model processes to somebody else (`builders.supervisor`).
    """

    def __init__(
        self, path: Path | None, *, gpu: bool, on_event: Callable[[ServerEvent], None] | None, watch: bool = True
    ) -> None:
        """Keep the settings; no file is made yet."""
        self._watch = watch
        self._path, self._offset = path, 0
        self._temporary: Path | None = None
        self._gpu, self._on_event = gpu, on_event
        self._faults: list[ServerEvent] = []
        self._started_at = 0.0

    @property
    def path(self) -> Path | None:
        """The file; None as long as a temporary one is not made."""
        return self._path or self._temporary

    def open(self) -> int:
        """A descriptor for the server to write to; the caller closes it."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Triton and each of its model processes write to it: only appending keeps them from overwriting.
            log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._offset = os.fstat(log).st_size
            return log
        log, name = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
        os.close(log)
        self._temporary, self._offset = Path(name), 0
        return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def remove_temporary(self) -> None:
        """Remove the file if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def follow(self, server: int, started_at: float, exited: threading.Event) -> None:
        """Tell the events of the log until `exited` is set and all is read; runs in a thread of its own.

        Args:
            server: the server's process id, whose model processes are watched.
            started_at: its start by `time.monotonic`, which the events' seconds count from.
            exited: set when the server and its model processes are gone.
        """
        path = self.path
        if path is None:
            return
        self._started_at = started_at
        watch, next_watch = ModelProcesses(), 0.0
        with path.open("rb") as log:
            log.seek(self._offset)
            rest = b""
            while True:
                # Asked before reading: what was written before the end is then surely read.
                over = exited.is_set()
                *lines, rest = (rest + log.read()).split(b"\n")
                if over and rest:
                    lines.append(rest)
                for line in lines:
                    if event := parse_log_line(line.decode("utf-8", "replace"), gpu=self._gpu):
                        self._tell(event)
                if over:
                    return
                if self._watch and time.monotonic() >= next_watch:
                    next_watch = time.monotonic() + _WATCH_S
                    for process in watch.died(server):
                        self._tell(death_notice(process))
                exited.wait(_POLL_S)

    def reason(self, *, since: float) -> str:
        """Why the server ended, in as few lines as tell it.

        Args:
            since: what was told before, in seconds since the start, did not end it.
        """
        tail = "" if self.path is None else self.path.read_text("utf-8", "replace")[-20_000:]
        return explain([fault for fault in self._faults if fault.seconds >= since], tail)

    def _tell(self, event: ServerEvent) -> None:
        seconds = time.monotonic() - self._started_at
        event = ServerEvent(event.kind, event.text, seconds, event.model, event.version)
        if event.kind in ("failed", "error"):
            # The last ones are enough for a reason; a server that runs for weeks must not collect them all.
            self._faults = [*self._faults[-49:], event]
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            _log.exception("on_event failed; it gets no more events")
            self._on_event = None
