"""The server's model processes, seen through /proc; standard library alone.

Triton (2.51 to at least 2.75) does not start a model process again that died, and keeps its model "ready" while the
requests that meet it fail. So the living ones are counted, for each model that is ready, against what it should have.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import Model
from triton_http import Triton

_STUB = "triton_python_backend_stub"
# Processes and ready versions are not read at one moment: while a version changes over, one look may be wrong.
_SECOND_LOOK_S = 0.3


@dataclass(frozen=True, order=True)
class Loss:
    """A model of which a process died.

    Attributes:
        model: its name.
        left: processes that live.
        expected: processes that should.
    """

    model: str
    left: int
    expected: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.model}: {self.left} of {self.expected} processes are left"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    name: str
    zombie: bool


def find_server(parent: int | None = None) -> int | None:
    """The process id of tritonserver, or None.

    Args:
        parent: only a child of this process counts; any by default, as in a container, where there is but one.
    """
    found = [
        process.pid
        for process in _processes()
        if process.name == "tritonserver" and not process.zombie and parent in (None, process.parent)
    ]
    return min(found, default=None)


def told_to_load(server: int) -> set[str]:
    """Models that a server was told to load when it started, from its command line; none where that does not say."""
    return {argument.partition("=")[2] for argument in _arguments(server) if argument.startswith("--load-model=")}


def dead_models(server: int, models: Sequence[Model], triton: Triton) -> list[Loss]:
    """Models of which a process died; models that are not ready are not looked at.

    Args:
        server: the process id of tritonserver.
        models: what it serves.
        triton: where it answers.
    """
    first = _losses(server, models, triton)
    if not first:
        return []
    time.sleep(_SECOND_LOOK_S)
    return sorted(set(first) & set(_losses(server, models, triton)))


def stubs_of(server: int, model: str | None = None) -> list[int]:
    """Process ids of a model's living processes; of all models without a name."""
    # The kernel cuts a process's name at 15 characters. 2.51 leaves a dead child unreaped: a zombie.
    return [
        process.pid
        for process in _processes()
        if process.parent == server
        and process.name == _STUB[:15]
        and not process.zombie
        and model in (None, _model_of(process.pid))
    ]


def _losses(server: int, models: Sequence[Model], triton: Triton) -> list[Loss]:
    live = Counter(map(_model_of, stubs_of(server)))
    losses = []
    for model in models:
        ready = triton.get(f"/v2/models/{model.name}/ready")
        if not ready.status:
            return []  # Nobody answers: what should be there cannot be told, and each question waits.
        expected = _expected(model.name, triton) if ready.ok else 0
        if live[model.name] < expected:
            losses.append(Loss(model.name, live[model.name], expected))
    return losses


def _expected(name: str, triton: Triton) -> int:
    """Processes of all versions that are ready, by what Triton has loaded; the files may say what comes next."""
    expected = 0
    for version in triton.versions(name):
        config = triton.get(f"/v2/models/{name}/versions/{version}/config").json()
        if not isinstance(config, dict) or config.get("backend") != "python":
            continue
        groups = config.get("instance_group") or [{}]
        expected += sum(int(group.get("count") or 1) * max(1, len(group.get("gpus") or [])) for group in groups)
    return expected


def _processes() -> list[_Process]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text("utf-8", "replace")
        except OSError:
            continue  # It ended meanwhile.
        # The name, in brackets, may hold anything.
        head, _, tail = stat.rpartition(")")
        state, parent = tail.split()[:2]
        found.append(_Process(int(folder.name), int(parent), head.partition("(")[2], state in "ZX"))
    return found


def _model_of(stub: int) -> str:
    """The model of a stub, from the instance name that Triton gave it: `<model>_<group>_<number>`."""
    named = [argument for argument in _arguments(stub)[1:] if re.fullmatch(r".+_\d+_\d+", argument)]
    return re.sub(r"_\d+_\d+$", "", named[-1]) if named else ""


def _arguments(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []
