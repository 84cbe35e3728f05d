"""Memory of a server and of its model processes, sampled while something else runs."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Memory:
    """Resident memory, MiB: tritonserver's own, and all its model processes' together; how many those are."""

    server: float
    models: float
    processes: int


def process_ids(group: int) -> set[int]:
    """Living processes of a group."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                found.add(int(folder.name))
    return found


def memory(pid: int) -> Memory:
    """Memory now of the process group that `pid` leads."""
    server, models, processes = 0.0, 0.0, 0
    for process in process_ids(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        except OSError:  # it has ended meanwhile
            continue
        resident = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0) / 1024
        if process == pid:
            server = resident
        else:
            models, processes = models + resident, processes + 1
    return Memory(server, models, processes)


class MemoryWatch:
    """Samples `memory` every `interval_s` inside a `with` block.

    Args:
        pid: of the server.
        interval_s: seconds.
    """

    def __init__(self, pid: int, interval_s: float = 1.0):
        """See the class."""
        self.samples: list[Memory] = []
        self._pid, self._interval = pid, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join()

    def text(self) -> str:
        """First, largest and last sample in a line."""
        if not self.samples:
            return "memory: no sample"
        first, last = self.samples[0], self.samples[-1]
        return (
            f"memory in MiB, first / largest / last of {len(self.samples)}: server {first.server:.0f} / "
            f"{max(s.server for s in self.samples):.0f} / {last.server:.0f}; {last.processes} model processes "
            f"{first.models:.0f} / {max(s.models for s in self.samples):.0f} / {last.models:.0f}"
        )

    def growth(self) -> tuple[float, float]:
        """By how much the largest sample is above the first, MiB: the server's, and its model processes' together."""
        first = self.samples[0]
        return max(s.server for s in self.samples) - first.server, max(s.models for s in self.samples) - first.models

    def _run(self) -> None:
        while True:
            self.samples.append(memory(self._pid))
            if self._stop.wait(self._interval):
                return
