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
        if all(member.zombie for member in _group_members(group)):
            return
        os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)


class ModelProcesses:
    """Notices a model process that died.

    Triton 2.51 says nothing of it: it does not start another, and keeps the model "ready" while each request fails.
    The server leaves such a child unreaped; one that it is just unloading is so for a moment only, hence two looks.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._names: dict[int, str] = {}
        self._suspects: set[int] = set()
        self._told: set[int] = set()

    def died(self, server: int) -> list[ServerEvent]:
        """Look once; an event for each model process that is now sure to have died, told once.

        Args:
            server: the process id of the server, also its group's.
        """
        children = [member for member in _group_members(server) if member.parent == server]
        for child in children:
            if not child.zombie and child.pid not in self._names:
                self._names[child.pid] = _instance_name(child.pid)
        zombies = {child.pid for child in children if child.zombie and self._names.get(child.pid)}
        sure = (zombies & self._suspects) - self._told
        self._suspects = zombies
        self._told = (self._told | sure) & zombies
        self._names = {child.pid: self._names.get(child.pid, "") for child in children}
        return [self._event(self._names[pid]) for pid in sorted(sure)]

    @staticmethod
    def _event(instance: str) -> ServerEvent:
        model = re.sub(r"_\d+_\d+$", "", instance)
        text = (
            f"a process of this model died ({instance}): its requests fail, though it counts as ready."
            " To do: touch a file of the model and load it again, or start the server anew"
        )
        return ServerEvent("error", text, model=model)


@dataclass(frozen=True)
class _Member:
    pid: int
    parent: int
    zombie: bool


def _group_members(group: int) -> list[_Member]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text("utf-8", "replace")
        except OSError:
            continue
        # The command's name, in brackets, may hold anything.
        state, parent, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group:
            members.append(_Member(int(entry.name), int(parent), state in "ZX"))
    return members


def _instance_name(stub: int) -> str:
    """The name that Triton gave the instance, or "" for a process that is no stub."""
    try:
        arguments = Path(f"/proc/{stub}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    named = [argument for argument in arguments[1:] if re.fullmatch(r".+_\d+_\d+", argument)]
    return named[-1] if arguments[0].endswith("triton_python_backend_stub") and named else ""
