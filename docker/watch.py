"""What the launcher knows of the models: which lost a process, and which answer nobody any more.

The look of `builders.supervisor`, for the server's image, which has no package of this project. It replaces nothing:
for that the repository would have to be written to, and here it is mounted read-only. A new start of the container
heals both. Standard library alone.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logs import say
from processes import Loss, dead_models
from repository import LaunchError, Model
from triton_http import Triton

#: Of Triton's error for a model whose process is there and does not move any more (stopped, or waiting for a disk).
_FROZEN = "is not healthy"
#: A lane, or a step of an ensemble; in brackets what its entry is called behind `encode` (builders/names.py).
_CALLED = re.compile("(?:encoder|tokenize)(_[a-z][a-z0-9_]*?)?_[0-9]+(?:_queued)?")
#: In place of a version: no served version calls this model. Versions begin at 1.
_NOT_CALLED = 0


@dataclass(frozen=True)
class WatchSettings:
    """How often models are looked at, seconds.

    Attributes:
        look_s: pause between two looks at the processes.
        canary_s: pause between two rounds in which every model is asked something; 0 asks nothing.
        deadline_s: longest wait for an answer. Hung is a model that for so long answers neither that nor anybody else.
    """

    look_s: float = 2.0
    canary_s: float = 10.0
    deadline_s: float = 30.0


@dataclass
class ModelState:
    """One model, as last seen.

    Attributes:
        loaded: Triton calls it ready. What a promote dropped is not, and nobody's matter any more.
        loss: processes that died.
        canary: `unknown` (not asked, as yet or because nobody calls it), `ok`, `busy` (it refuses because of its load,
            or others were answered meanwhile), `failed` (an error) or `hung`.
        times: how often in a row the canary found the same.
        canary_s: how long the last one took, seconds.
        said: the canary's error, for people.
    """

    loaded: bool = False
    loss: Loss | None = None
    canary: str = "unknown"
    times: int = 0
    canary_s: float = 0.0
    said: str = ""

    @property
    def dead(self) -> int:
        """Processes that died."""
        return self.loss.expected - self.loss.left if self.loss else 0

    @property
    def ready(self) -> bool:
        """It answers, and none of its processes is dead; one error alone may be a model that is being changed."""
        bad = self.canary == "hung" or (self.canary == "failed" and self.times > 1)
        return self.loaded and self.loss is None and not bad

    @property
    def fatal(self) -> str:
        """What only a new start heals, for people; empty when there is nothing of the kind."""
        if self.loss:
            return str(self.loss)
        frozen = self.canary == "failed" and self.times > 1 and _FROZEN in self.said
        return self.said if frozen or self.canary == "hung" else ""


@dataclass
class _Progress:
    """What the canary remembers of a version of a model between two rounds; None leaves the version to Triton."""

    version: int | None = None
    stuck_at: int | None = None
    answered: int = -1
    moved: float = 0.0
    refused_since: float | None = None
    body: dict[str, Any] | None = field(default=None)


class Watch:
    """Looks at the models of one server, in two threads of its own: its caller never waits for the server.

    Args:
        models: tells what it may serve; asked at each look, as a promote may bring new lanes.
        port: its HTTP port.
        settings: how often.
    """

    def __init__(self, models: Callable[[], Sequence[Model]], port: int, settings: WatchSettings | None = None) -> None:
        """Nothing is looked at before `start`."""
        self._settings = settings or WatchSettings()
        self._read_models, self._models = models, list(models())
        self._expected = {model.name for model in self._models}
        self._quick = Triton(port, timeout_s=5.0)
        self._patient = Triton(port, timeout_s=self._settings.deadline_s)
        self._states = {model.name: ModelState() for model in self._models}
        self._progress: dict[str, _Progress] = {}
        self._looked = False
        self._closed = threading.Event()

    def start(self, server: int) -> None:
        """Look from now on.

        Args:
            server: the process id of tritonserver.
        """
        rounds: list[tuple[float, Callable[[], None]]] = [(self._settings.look_s, lambda: self.look(server))]
        if self._settings.canary_s > 0:
            rounds.append((self._settings.canary_s, self.ask_all))
        for pause_s, work in rounds:
            threading.Thread(target=self._again, args=(pause_s, work), name="watch", daemon=True).start()

    def close(self) -> None:
        """Look no more; what is under way is not waited for."""
        self._closed.set()

    def states(self) -> dict[str, ModelState]:
        """What is loaded, and the entries that were there at the start or loaded since, as last seen, by name.

        What a build publishes later is loaded by a promote or by the next start.
        """
        entries = {model.name for model in self._models if model.is_entry and model.name in self._expected}
        return {name: state for name, state in list(self._states.items()) if name in entries or state.loaded}

    def entries(self) -> set[str]:
        """Entries and ensembles that are loaded; before the first look, all."""
        known = [model.name for model in self._models if model.is_entry]
        return {name for name in known if self._states[name].loaded or not self._looked}

    def fatal(self) -> dict[str, str]:
        """What only a new start heals, by model."""
        return {name: state.fatal for name, state in list(self._states.items()) if state.fatal}

    def look(self, server: int) -> None:
        """See once which models are loaded, and count their processes."""
        with suppress(LaunchError, OSError):  # A repository that is just being written says what it has next time.
            models = list(self._read_models())
            for model in models:
                self._states.setdefault(model.name, ModelState())
            self._models = models
        answering = True
        for name, state in self._states.items():
            answer = self._quick.get(f"/v2/models/{name}/ready") if answering else None
            # A server that does not answer would let each question wait.
            answering = answer is not None and answer.status != 0
            state.loaded = answer is not None and answer.ok
            if state.loaded:
                self._expected.add(name)
        losses = {loss.model: loss for loss in dead_models(server, self._models, self._quick)} if answering else {}
        for name, state in self._states.items():
            state.loss = losses.get(name)
        self._looked = answering

    def ask_all(self) -> None:
        """Ask every model that is loaded something small, one after the other."""
        for name, state in list(self._states.items()):
            if self._closed.is_set():
                return
            if not state.loaded:
                state.canary, state.times, state.said = "unknown", 0, ""
                continue
            progress, version = self._progress.setdefault(name, _Progress()), self._version(name)
            if version not in (None, progress.version):
                # What was found of another version says nothing of this one.
                progress = self._progress[name] = _Progress(version)
                state.canary, state.times, state.said = "unknown", 0, ""
            began = time.monotonic()
            found, state.said = self._ask(name, progress) if progress.version != _NOT_CALLED else ("unknown", "")
            state.canary_s = time.monotonic() - began
            state.times = state.times + 1 if state.canary == found else 1
            state.canary = found

    def _ask(self, name: str, progress: _Progress) -> tuple[str, str]:
        before = self._answered(name, progress)
        if before is None:
            return "failed", f"{name} has no statistics"
        if before == progress.stuck_at:
            # Not again before it has worked: Triton keeps requests whose client has gone, and they would pile up.
            return "hung", f"{name} still answers nobody"
        progress.stuck_at = None
        progress.body = progress.body or self._request(name)
        if progress.body is None:
            return "failed", f"{name} has no metadata"
        answer = self._patient.post(f"{_path(name, progress.version)}/infer", progress.body)
        if answer.timed_out:
            return self._after_silence(name, before, progress)
        if answer.status != 503 or "not ready" in answer.text:
            progress.refused_since = None
            return ("ok", "") if answer.ok else ("failed", f"{name} answers {answer.status}: {answer.text[:200]}")
        return self._after_refusal(name, progress)

    def _version(self, name: str) -> int | None:
        """The served version of a lane or of a step; None for others, and where the server does not say.

        Triton chooses the highest that is loaded: a bad one that a rollback left, or one on trial, is nobody's illness.
        `_NOT_CALLED` where it is loaded in such versions alone. A lane that the served version does call is asked in
        that even where it has not got it, and fails; of a step that is missing so its ensemble's own canary tells.
        """
        found = _CALLED.fullmatch(name)
        entry = f"encode{found[1] or ''}" if found else ""
        served = max(self._quick.versions(entry), default=None) if entry else None
        if served is None or served in (there := self._quick.versions(name)):
            return served
        lanes = self._lanes(entry, served)
        return served if name in lanes else _NOT_CALLED if there and lanes else None

    def _lanes(self, entry: str, version: int) -> list[str]:
        """The lanes that a loaded version of an entry calls; none where the server does not say."""
        try:
            parameters = self._quick.get(f"{_path(entry, version)}/config").json()["parameters"]
            return [bucket["model"] for bucket in json.loads(parameters["entry"]["string_value"])["buckets"]]
        except (KeyError, TypeError, ValueError):
            return []

    def _after_silence(self, name: str, before: int, progress: _Progress) -> tuple[str, str]:
        """A long queue, or a model that computes nothing any more?"""
        now = self._answered(name, progress)
        if now is None or now != before:  # it counts from 0 once it was loaded anew
            return "busy", ""
        if self._version(name) not in (None, progress.version):
            return "unknown", ""  # A promote changed over meanwhile.
        progress.stuck_at = now
        return "hung", f"{name} has answered nobody for {self._settings.deadline_s:g} s"

    def _after_refusal(self, name: str, progress: _Progress) -> tuple[str, str]:
        """Too much to do, or a queue that rejects in front of a model that computes nothing any more?"""
        now = time.monotonic()
        if progress.refused_since is None:
            progress.refused_since = now
        self._answered(name, progress)
        if now - max(progress.refused_since, progress.moved) < self._settings.deadline_s:
            return "busy", ""
        return "hung", f"{name} refuses requests, and has answered nobody for {self._settings.deadline_s:g} s"

    def _answered(self, name: str, progress: _Progress) -> int | None:
        """Requests that the version has answered, None where it cannot be had; notes when it last changed."""
        try:
            versions = self._quick.get(f"{_path(name, progress.version)}/stats").json()["model_stats"]
            answered = sum(int(version["inference_stats"]["success"]["count"]) for version in versions)
        except (KeyError, TypeError, ValueError):
            return None
        if answered != progress.answered:
            progress.answered, progress.moved = answered, time.monotonic()
        return answered

    def _request(self, name: str) -> dict[str, Any] | None:
        """The smallest request that a model takes, from its own metadata, ahead of background work."""
        metadata = self._quick.get(f"/v2/models/{name}").json()
        if not isinstance(metadata, dict) or not metadata.get("inputs") or not metadata.get("outputs"):
            return None
        options = {"priority": 1, "timeout": int(self._settings.deadline_s * 1e6)}
        return {
            "inputs": [smallest_input(tensor) for tensor in metadata["inputs"]],
            "parameters": options,
            "outputs": [{"name": metadata["outputs"][0]["name"]}],
        }

    def _again(self, pause_s: float, work: Callable[[], None]) -> None:
        told = ""
        while not self._closed.wait(pause_s):
            said = ""
            try:
                work()
            except Exception as error:  # the watch is worth more than one look
                place = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
                said = f"error: a look at the models failed, and is tried again: {what}"
            if said and said != told:
                say(said)
            told = said


def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")


def smallest_input(tensor: dict[str, Any]) -> dict[str, Any]:
    """One row of an input of an entry (a text) or of a lane (one token, and no second text), as JSON.

    Args:
        tensor: name, datatype and shape, as a model's metadata has them.
    """
    shape = [1 if size < 0 else int(size) for size in tensor["shape"]]
    count = 1
    for size in shape:
        count *= size
    # `length` and `segment_start` are 1, the token itself may be any.
    value: Any = "canary" if tensor["datatype"] == "BYTES" else int(tensor["name"] != "input_ids")
    return {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": [value] * count}
