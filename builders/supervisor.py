"""Sees what Triton's own readiness does not, dead and hung model processes, and replaces them.

Triton 2.51 does not start a model process again: its share of the requests fails, one batch a second, and every health
check stays green. A load of the model after a file of its version was touched makes new processes for all its
instances and changes over as a promote does: what the living ones compute is answered (measured: no request lost).
Touching the configuration is not enough, and a `load` alone does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from builders.canary import NOT_CALLED, Canary, CanarySettings, Finding
from builders.errors import ControlError
from builders.health import ModelStatus, Status
from builders.http_api import HttpApi
from builders.model_processes import ModelProcess, ModelProcesses, cpu_seconds
from builders.names import (
    ensembles_beside,
    is_any_lane,
    is_ensemble,
    is_entry,
    is_lane,
    is_of_any_ensemble,
    is_of_ensemble,
    model_name,
)
from builders.server_checks import entry_facts
from builders.triton_log import EventKind, ServerEvent

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisorSettings:
    """How a supervisor works.

    Attributes:
        look_s: pause between two looks at the processes, seconds.
        lanes_s: pause between two looks at which lanes the entries have, seconds.
        canary: how often models are asked.
        loop_heals: so many heals of one model within `loop_s` are a crash loop.
        loop_s: seconds.
        backoff_s: longest pause between two heals of a model, seconds: none after the first, then 1, 2, 4 …
        idle_s: a process that a heal replaced and that is still there is killed when it has used no CPU for so long,
            seconds: Triton 2.51 forgets to unload it when a request died with its neighbour.
    """

    look_s: float = 0.5
    lanes_s: float = 5.0
    canary: CanarySettings = field(default_factory=CanarySettings)
    loop_heals: int = 3
    loop_s: float = 600.0
    backoff_s: float = 60.0
    idle_s: float = 60.0


@dataclass
class _Model:
    """What is known of one model."""

    dead: dict[int, ModelProcess] = field(default_factory=dict)
    heals: list[float] = field(default_factory=list)
    healed: int = 0
    not_before: float = 0.0
    changed: float = 0.0
    """When its processes were last replaced or killed; what a canary asked before says nothing of the new ones."""
    hung_since: float | None = None
    finding: Finding = field(default_factory=Finding)
    canary: Canary | None = None
    problem: str = ""


@dataclass
class _Retired:
    """A process of before a heal, and when it last used CPU."""

    cpu: float
    since: float


class Supervisor:
    """Watches the models of one server from the outside, in threads of its own.

    Args:
        repository: the server's model repository; a heal touches `MODEL/VERSION/model.py` there.
        models: the loaded models, entries among them.
        api: the server's HTTP API, with the key of the model control API.
        server: the server's process id, or None when it is gone.
        settings: how.
        on_event: told what happens; from several threads.
        held: called after a heal: a request that a dead process failed keeps its model, and so the server, from ending
            by itself (Triton 2.51).
    """

    def __init__(
        self,
        repository: Path,
        models: Sequence[str],
        api: HttpApi,
        server: Callable[[], int | None],
        settings: SupervisorSettings | None = None,
        on_event: Callable[[ServerEvent], None] = lambda event: None,
        held: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is watched before `start`."""
        self._repository, self._api, self._server, self._on_event = repository, api, server, on_event
        self._settings, self._held = settings or SupervisorSettings(), held
        self._models = {model: _Model() for model in models}
        # Lanes come and go with the versions of their entries.
        self._entries = [model for model in models if is_entry(model) and lanes_of(repository, model)]
        self._looked_at_lanes = time.monotonic()
        self._processes = ModelProcesses()
        self._retired: dict[int, _Retired] = {}
        self._lock = threading.Lock()
        self._began, self._started = time.monotonic(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Watch from now on; call it when every model is loaded."""
        self._started = True
        self._follow_lanes()
        for name, model in self._models.items():
            self._start_canary(name, model)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; call it before the server is stopped. A load under way is waited for, for some seconds."""
        self._closed.set()
        for model in list(self._models.values()):
            if model.canary is not None:
                model.canary.close()
        if self._thread.is_alive():
            self._thread.join(10)

    def status(self) -> Status:
        """What is known now."""
        alive = self._server() is not None
        with self._lock:
            models = tuple(self._status(name, model) for name, model in self._models.items())
        return Status(alive, alive and self._started and all(model.ready for model in models), models)

    def _status(self, name: str, model: _Model) -> ModelStatus:
        finding = model.finding
        well = not _is_bad(finding)
        looping = self._looping(model)
        texts = (model.problem, "" if well else finding.text, "it dies again and again" if looping else "")
        return ModelStatus(
            model=name,
            ready=self._started and well and not model.dead and not looping,
            dead=len(model.dead),
            heals=model.healed,
            crash_loop=looping,
            canary=finding.health,
            canary_seconds=round(finding.seconds, 4),
            text="; ".join(text for text in texts if text),
        )

    def _looping(self, model: _Model) -> bool:
        since = time.monotonic() - self._settings.loop_s
        return sum(at >= since for at in model.heals) >= self._settings.loop_heals

    def _watch(self) -> None:
        while not self._closed.wait(self._settings.look_s):
            server = self._server()
            if server is None:
                return
            try:
                self._look(server)
            except Exception:  # the watch is worth more than one look
                _log.exception("a look at the model processes failed")

    def _look(self, server: int) -> None:
        for process in self._processes.died(server):
            if self._retired.pop(process.pid, None) is None:
                self._note_death(process)
        self._end_retired()
        now = time.monotonic()
        if now - self._looked_at_lanes >= self._settings.lanes_s:
            self._looked_at_lanes = now
            self._follow_lanes()
        for name, model in list(self._models.items()):
            if model.dead and now >= model.not_before and not self._closed.is_set():
                self._heal(name, model)

    def _follow_lanes(self) -> None:
        """Watch the lanes that the served versions have; those that a promote dropped are nobody's any more."""
        if not self._entries:
            return
        now = {lane for entry in self._entries for lane in lanes_of(self._repository, entry)}
        now.update(model for entry in self._entries for model in ensembles_beside(self._repository, entry))
        gone = [name for name in self._models if (is_any_lane(name) or is_of_any_ensemble(name)) and name not in now]
        new = now - self._models.keys()
        with self._lock:
            for name in gone:
                canary = self._models.pop(name).canary
                if canary is not None:
                    canary.close()
            for name in sorted(new):
                self._models[name] = _Model()
        for name in sorted(new) if self._started and self._thread.is_alive() else ():
            self._start_canary(name, self._models[name])

    def _start_canary(self, name: str, model: _Model) -> None:
        if self._settings.canary.every_s > 0:
            version = partial(served_version, self._api, tuple(self._entries), name)
            model.canary = Canary(self._api, name, self._settings.canary, self._found, version)
            model.canary.start()

    def _note_death(self, process: ModelProcess) -> None:
        model = self._models.get(process.model)
        if model is None:
            return
        with self._lock:
            model.dead[process.pid] = process
        self._tell("error", process.model, f"a process of this model died ({process.instance})")

    def _heal(self, name: str, model: _Model) -> None:
        """Replace every process of the versions that lost one."""
        versions = sorted({process.version for process in model.dead.values()})
        before = [process for version in versions for process in self._processes.living(name, version)]
        began = time.monotonic()
        with self._lock:
            model.heals.append(began)
            model.heals = [at for at in model.heals if at >= began - self._settings.loop_s]
        pause = self._pause(model)
        try:
            for version in versions:
                # Triton loads a version again when a file in its folder is newer; what it serves stays until then.
                os.utime(self._repository / name / str(version) / "model.py")
            self._api.load(name)
        except (ControlError, OSError, TimeoutError) as error:
            pause = self._pause(model, failed=True)
            with self._lock:
                model.not_before = time.monotonic() + pause
                model.problem = f"it could not be healed: {error}"
            self._tell("failed", name, f"{model.problem}; the next try is in {pause:.0f} s")
            return
        for process in before:
            used = cpu_seconds(process.pid)
            if used is not None:
                self._retired[process.pid] = _Retired(used, time.monotonic())
        with self._lock:
            model.dead.clear()
            model.problem = ""
            model.healed += 1
            model.not_before = time.monotonic() + pause
            model.finding, model.hung_since, model.changed = Finding(), None, time.monotonic()
        seconds = time.monotonic() - began
        self._held()
        if model.canary is not None:
            model.canary.forget()
        self._ask_again_who_waited(name)
        self._tell("healed", name, f"new processes answer after {seconds:.1f} s")
        if self._looping(model):
            number = len(model.heals)
            text = f"it died {number} times in {self._settings.loop_s:.0f} s; the next heal waits {pause:.0f} s"
            self._tell("error", name, text)

    def _ask_again_who_waited(self, lane: str) -> None:
        """The entry of a healed lane failed what it held for it, which no count of answers shows."""
        for name, entry in self._models.items():
            if is_entry(name) and is_lane(lane, model_name(name)):
                with self._lock:
                    entry.finding, entry.hung_since, entry.changed = Finding(), None, time.monotonic()
                if entry.canary is not None:
                    entry.canary.forget()

    def _pause(self, model: _Model, *, failed: bool = False) -> float:
        """Seconds before the next heal: none after the first that worked, then twice as long each time."""
        earlier = len(model.heals) - 1
        pause = 2.0**earlier if failed else 2.0**earlier / 2 * (earlier > 0)
        return min(self._settings.backoff_s, pause)

    def _end_retired(self) -> None:
        """Kill processes that a heal replaced and that Triton forgot, once they are idle."""
        now = time.monotonic()
        for pid, retired in list(self._retired.items()):
            used = cpu_seconds(pid)
            if used is None:
                # Killed and not reaped it stays, so that its death is not told.
                if not Path(f"/proc/{pid}").exists():
                    del self._retired[pid]
            elif used > retired.cpu:
                retired.cpu, retired.since = used, now
            elif now - retired.since >= self._settings.idle_s:
                retired.since = now
                self._kill(pid)

    @staticmethod
    def _kill(pid: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _found(self, name: str, finding: Finding) -> None:
        """What a canary showed; a hung model's processes are ended, and so healed."""
        model = self._models.get(name)
        if model is None:
            return
        with self._lock:
            if finding.began < model.changed:
                return
            before, model.finding = model.finding, finding
            if finding.health != "hung":
                model.hung_since = None
            elif model.hung_since is None:
                model.hung_since = time.monotonic()
            # Its own: an entry calls neither another model's nor the steps of ensembles.
            lanes = [
                other
                for other_name, other in self._models.items()
                if is_entry(name) and is_lane(other_name, model_name(name))
            ]
            lanes_well = all(lane.finding.health in ("ok", "busy") and not lane.dead for lane in lanes)
        if _is_bad(finding) and not (_is_bad(before) and finding.health == before.health):
            self._tell("error", name, f"its canary {finding.health}: {finding.text}")
        elif _is_bad(before) and finding.health in ("ok", "busy"):
            self._tell("healed", name, "its canary is answered again")
        elif _is_bad(before) and finding.health == "unknown":
            self._tell("healed", name, f"what its canary found is over: {finding.text}")
        if model.hung_since is not None and not model.dead:
            # An entry whose lane hangs waits for it: the lanes' own canaries tell that within one more deadline.
            now, deadline = time.monotonic(), self._settings.canary.deadline_s
            patience, at_fault = (2 * deadline, lanes_well) if is_entry(name) else (0.0, True)
            if at_fault and now - model.hung_since >= patience and now - model.changed >= deadline:
                self._end_hung(name, model, finding.version)

    def _end_hung(self, name: str, model: _Model, version: int | None) -> None:
        """Kill the processes of the version that hangs: what they hold gets an error, and their death is healed."""
        with self._lock:
            model.changed = time.monotonic()
        for process in self._processes.living(name, version):
            if process.pid not in self._retired:
                self._tell("error", name, f"it hangs: its process {process.instance} is killed")
                self._kill(process.pid)

    def _tell(self, kind: EventKind, model: str, text: str) -> None:
        self._on_event(ServerEvent(kind, text, time.monotonic() - self._began, model))


def _is_bad(finding: Finding) -> bool:
    """Whether a model counts as not ready for it: one error alone may be a model that is just being changed."""
    return finding.health == "hung" or (finding.health == "failed" and finding.times > 1)


def served_version(api: HttpApi, entries: Sequence[str], model: str) -> int | None:
    """The version of a lane, or of a step of an ensemble, that is served; None where the server does not say.

    Triton takes the highest that is loaded: a bad one that a rollback left, or one on trial, must not make its server
    look ill. `NOT_CALLED` where it is loaded in such versions alone. A lane that the served version does call is asked
    in that even where it has not got it, and fails; of a step that is missing so its ensemble's own canary tells.
    """
    for entry in entries:
        name = model_name(entry)
        if is_lane(model, name) or (is_of_ensemble(model, name) and not is_ensemble(model)):
            served, there = max(api.versions(entry), default=None), api.versions(model)
            if served is None or served in there:
                return served
            lanes = api.lanes(entry, served)
            return served if model in lanes else NOT_CALLED if there and lanes else None
    return None


def lanes_of(repository: Path, entry: str) -> list[str]:
    """The bucket models that the entry's configuration names; none while it cannot be read."""
    try:
        buckets = entry_facts(repository, entry).get("buckets", [])
        return [str(bucket["model"]) for bucket in buckets]
    except (OSError, ValueError, KeyError, TypeError):
        return []
