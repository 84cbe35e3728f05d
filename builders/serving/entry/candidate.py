"""The lease of a version on trial, and the thread that opens and ends the trial by it.

The control command writes the lease into the state file in the model repository and renews it every few seconds. A
command that dies renews no more, and the trial is over within seconds, whatever else happens. The entry is not loaded
anew for it: without a lease, a look at the file's time once a second is all that it costs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .trial import Trial

#: A lease that ends later than this was written by another clock, or for another time; seconds.
LONGEST_S = 60.0
#: Between two looks, seconds: for a lease, and for what the candidate owes while there is one.
IDLE_S, BUSY_S = 1.0, 0.1
#: Longest wait for the thread when the model is unloaded, seconds: a call of a lane may be left without an answer then.
CLOSE_S = 5.0


@dataclass(frozen=True)
class Lease:
    """What the control command wrote.

    Attributes:
        version: on trial.
        share: of the requests that it answers, more than 0 and at most a half.
        until: end of the lease, seconds since 1970.
        deadline_s: longest that it may take for an answer, seconds.
        entry: parameters of its entry (`EntryConfig.from_parameters`).
    """

    version: int
    share: float
    until: float
    deadline_s: float
    entry: dict[str, Any]

    def holds(self, now: float) -> bool:
        """Whether it is to be followed at a time, seconds since 1970."""
        return now < self.until <= now + LONGEST_S


def state_file(model_folder: Path, model: str) -> Path:
    """The state file of an entry, as builders/state.py names it: `.served.json`, `.served.minilm.json`.

    Args:
        model_folder: of the entry, in the model repository.
        model: the entry's name.
    """
    name = model.removeprefix("encode").removeprefix("_")
    return model_folder.parent / (f".served.{name}.json" if name else ".served.json")


def read_lease(path: Path, model: str) -> Lease | None:
    """The lease in a state file; None without one, and where the file cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["entries"][model].get("candidate")
        return None if found is None else Lease(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class CandidateWatch:
    """Follows the lease in a thread of its own.

    Args:
        path: the state file.
        model: name of the entry.
        served: its version: a lease on this one is none.
        open_trial: makes the trial of a lease; may take seconds, and raise.
        failed: told the first of a row of failures to open one.
        changed: told when a trial has begun or ended.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        served: int,
        open_trial: Callable[[Lease], Trial],
        failed: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ):
        """See the class; `start` starts the thread."""
        self._path, self._model, self._served = path, model, served
        self._open, self._failed, self._changed, self._clock = open_trial, failed, changed, clock
        self._seen: tuple[int, int, int] | None = None
        self._found: Lease | None = None
        self._lease: Lease | None = None
        self._trial: Trial | None = None
        self._ended: list[Trial] = []
        self._said = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="candidate", daemon=True)

    @property
    def trial(self) -> Trial | None:
        """What is on trial now; for each batch, so it does next to nothing without one."""
        trial = self._trial
        if trial is None:
            return None
        lease = self._lease
        # Not only the thread's word: it may be busy when the lease ends.
        return trial if lease is not None and lease.holds(self._clock()) else None

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; requests may no longer come. A candidate that hangs is not waited for."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return
        self._end()
        self._tidy()

    def look(self) -> None:
        """Look once; from the watch's own thread."""
        lease = self._read()
        if lease is not None and (lease.version == self._served or not lease.holds(self._clock())):
            lease = None
        trial = self._trial
        if trial is not None and (lease is None or lease.version != trial.version):
            self._end()
        self._lease = lease
        if lease is None:
            self._said = ""
        elif self._trial is not None:
            self._trial.share = lease.share
        elif not any(one.owes for one in self._ended):
            # Opening asks the lanes, which may hang, and this thread alone keeps the deadlines.
            self._begin(lease)
        for one in (self._trial, *self._ended):
            if one is not None:
                one.look()
        self._tidy()

    def _read(self) -> Lease | None:
        """The file's lease; read again only when the file is another one."""
        try:
            stat = self._path.stat()
        except OSError:
            self._seen, self._found = None, None
            return None
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen != self._seen:
            self._found, self._seen = read_lease(self._path, self._model), seen
        return self._found

    def _begin(self, lease: Lease) -> None:
        try:
            self._trial = self._open(lease)
        except Exception as error:  # the served version answers everything, as before
            said = f"version {lease.version} is not tried: {type(error).__name__}: {error}"
            if said != self._said:
                self._failed(said)
            self._said = said
        else:
            self._changed()

    def _end(self) -> None:
        if self._trial is not None:
            self._ended.append(self._trial)
            self._trial = None
            self._changed()

    def _tidy(self) -> None:
        """Close the ended trials whose last request is done; one with a call that hangs keeps its threads."""
        for trial in [one for one in self._ended if one.idle]:
            self._ended.remove(trial)
            trial.close()

    def _watch(self) -> None:
        while not self._closed.wait(BUSY_S if self._trial or self._ended else IDLE_S):
            try:
                self.look()
            except Exception as error:  # a trial is never worth the watch
                self._failed(f"a look at the trial failed: {type(error).__name__}: {error}")
