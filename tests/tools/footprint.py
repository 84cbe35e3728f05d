"""What a server and its model processes hold at one moment: memory, open files, threads, shared memory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from builders.server_checks import SHARED_MEMORY
from tests.tools.memory import process_ids

_INSTANCE = re.compile(r".+_\d+_\d+")


@dataclass(frozen=True)
class Held:
    """What one process or several together hold.

    Attributes:
        own: memory that no file is behind, MiB: anonymous, and its part of what is in shared memory. Pages of libraries
            are left out: of them each process counts the less the more others map them, whoever those are.
        pss: all memory, MiB, each shared page counted in equal parts by those that map it.
        rss: memory, MiB, shared pages counted in each process.
        descriptors: open files.
        threads: of all.
        cpu_s: CPU time used so far, seconds.
    """

    own: float = 0.0
    pss: float = 0.0
    rss: float = 0.0
    descriptors: int = 0
    threads: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Footprint:
    """One moment.

    Attributes:
        server: tritonserver itself.
        models: its model processes together.
        instances: own memory in MiB of each model process by the name of its model instance; the id where it has none.
        pids: of all of them, rising.
        regions: files of the server in shared memory.
        shared: their sizes together, MiB.
    """

    server: Held
    models: Held
    instances: Mapping[str, float] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    regions: int = 0
    shared: float = 0.0


def footprint(pid: int, shm_prefix: str) -> Footprint:
    """What the process group that `pid` leads holds now.

    Args:
        pid: of the server.
        shm_prefix: how its files in shared memory begin.
    """
    found = {process: one for process in sorted(process_ids(pid)) if (one := _held(process)) is not None}
    models = [one for process, one in found.items() if process != pid]
    sizes = [_size(path) for path in SHARED_MEMORY.glob(f"{shm_prefix}*")]
    return Footprint(
        found.get(pid, Held()),
        Held(
            sum(one.own for one in models),
            sum(one.pss for one in models),
            sum(one.rss for one in models),
            sum(one.descriptors for one in models),
            sum(one.threads for one in models),
            sum(one.cpu_s for one in models),
        ),
        {_name(process): one.own for process, one in found.items() if process != pid},
        tuple(found),
        len(sizes),
        sum(sizes),
    )


def _held(pid: int) -> Held | None:
    folder = Path(f"/proc/{pid}")
    try:
        rollup = dict(re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text("utf-8"), re.MULTILINE))
        fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        descriptors = len(os.listdir(folder / "fd"))
    except OSError:  # it has ended meanwhile
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    mib = {name: int(kb) / 1024 for name, kb in rollup.items()}
    own = mib["Pss_Anon"] + mib["Pss_Shmem"]
    return Held(own, mib["Pss"], mib["Rss"], descriptors, int(fields[17]), cpu_s)


def _name(pid: int) -> str:
    """The model instance, for example encode_0_1; Triton gives it to the process near the end of its arguments."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return str(pid)
    named = [argument for argument in arguments[2:] if _INSTANCE.fullmatch(argument)]
    return named[-1] if named else str(pid)


def _size(path: Path) -> float:
    try:
        return path.stat().st_size / 2**20
    except OSError:
        return 0.0
