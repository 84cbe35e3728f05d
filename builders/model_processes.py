"""The processes of a server's group: noticing a model process that died, and leaving none behind."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from builders.triton_log import ServerEvent


def end_group(group: int) -> None:
    """Kill what is left of the group of an ended, not yet reaped server, and wait until it is gone."""
    for _ in range(100):
        if all(member.zombie for member in _processes() if member.group == group):
            return
        os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)


@dataclass(frozen=True)
class ModelProcess:
    """A process that runs one instance of a Python model.

    Attributes:
        pid: its process id.
        instance: the name that Triton gave it, such as `encode_0_1`.
        model: the Triton model.
        version: the version of it.
    """

    pid: int
    instance: str
    model: str
    version: int


class ModelProcesses:
    """Knows the model processes of a server, and notices one that died. One thread looks; any may ask `living`.

    Triton 2.51 says nothing of it: it does not start another, and keeps the model "ready" while each request fails.
    The server leaves such a child unreaped; one that it is just unloading is so for a moment only, hence `sure_s`.

    Args:
        sure_s: how long a process must have been seen dead, seconds.
    """

    def __init__(self, sure_s: float = 1.0) -> None:
        """Nothing is known yet."""
        self._sure_s = sure_s
        self._known: dict[int, ModelProcess | None] = {}
        self._dead_since: dict[int, float] = {}
        self._told: set[int] = set()

    def died(self, server: int) -> list[ModelProcess]:
        """Look once; each process that is now sure to have died, told once.

        Args:
            server: the process id of the server.
        """
        now = time.monotonic()
        children = {member.pid: member for member in _processes() if member.parent == server}
        # Put in place at once: `living` is asked from other threads.
        known = {pid: self._known.get(pid) for pid in children}
        for pid, child in children.items():
            if not child.zombie and known[pid] is None:
                # A child that is not yet a stub (between fork and exec) is asked again at the next look.
                known[pid] = _model_process(pid)
        self._known = known
        dead = {pid for pid, child in children.items() if child.zombie and known[pid] is not None}
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        sure = {pid for pid, since in self._dead_since.items() if now - since >= self._sure_s} - self._told
        self._told = (self._told & dead) | sure
        return [process for pid in sorted(sure) if (process := known[pid])]

    def living(self, model: str, version: int | None = None) -> list[ModelProcess]:
        """The processes of a model, or of one version of it, that were alive at the last look."""
        return [
            process
            for pid, process in self._known.items()
            if process and process.model == model and version in (None, process.version) and pid not in self._dead_since
        ]


def death_notice(process: ModelProcess) -> ServerEvent:
    """The event of a process that died where nobody heals it."""
    text = (
        f"a process of this model died ({process.instance}): its requests fail, though it counts as ready."
        " To do: touch a file of the model and load it again, or start the server anew"
    )
    return ServerEvent("error", text, model=process.model, version=process.version)


def cpu_seconds(pid: int) -> float | None:
    """CPU time that a process has used, seconds; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Member:
    pid: int
    parent: int
    group: int
    zombie: bool


def _processes() -> list[_Member]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text("utf-8", "replace")
        except OSError:
            continue
        # The command's name, in brackets, may hold anything.
        state, parent, group = stat.rpartition(")")[2].split()[:3]
        members.append(_Member(int(entry.name), int(parent), int(group), state in "ZX"))
    return members


def _model_process(pid: int) -> ModelProcess | None:
    """What a process runs, or None for one that is no stub (yet)."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    if not arguments[0].endswith("triton_python_backend_stub") or len(arguments) < 2:
        return None
    # .../MODEL/VERSION/model.py, then the shared memory's name and sizes, and the instance's name near the end.
    folder = Path(arguments[1]).parent
    named = [argument for argument in arguments[2:] if re.fullmatch(r".+_\d+_\d+", argument)]
    if not named or not folder.name.isdigit():
        return None
    return ModelProcess(pid, named[-1], folder.parent.name, int(folder.name))
