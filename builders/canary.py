"""A small request of our own, again and again: does a model answer, and if not, does it still work at all?"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from builders.errors import ControlError, UnreachableError
from builders.http_api import HttpApi, message_of, model_path

_log = logging.getLogger(__name__)

#: ok: it answered. busy: it refused because of its load, or others were answered meanwhile. failed: an error. hung:
#: for the whole deadline nobody was answered, neither the canary nor anyone else. unknown: not asked, as yet or because
#: nobody calls it.
Health = Literal["unknown", "ok", "busy", "failed", "hung"]

#: In place of a version: no served version calls this model. Versions begin at 1.
NOT_CALLED = 0


@dataclass(frozen=True)
class Finding:
    """What a model's last canary showed.

    Attributes:
        health: see `Health`.
        seconds: until its answer; the deadline where none came.
        text: the error, for people.
        times: how often in a row the same was found.
        began: when it was asked, by `time.monotonic`.
        version: that was asked; None where it was left to Triton, or nobody was.
    """

    health: Health = "unknown"
    seconds: float = 0.0
    text: str = ""
    times: int = 0
    began: float = 0.0
    version: int | None = None


@dataclass(frozen=True)
class CanarySettings:
    """How often a model is asked.

    Attributes:
        every_s: pause between two requests to one model, seconds; 0 asks nothing.
        deadline_s: longest wait for an answer, seconds.
    """

    every_s: float = 10.0
    deadline_s: float = 30.0


class Canary:
    """Asks one model in a thread of its own, and keeps what was found.

    The request goes straight to the model and holds one text of a few tokens, ahead of background work where the model
    has levels. A model that did not answer is not asked again before it has worked: Triton's HTTP front keeps requests
    whose client has gone, so that they would pile up.

    Args:
        api: the server.
        model: an entry or a lane.
        settings: how often.
        found: told each finding, from the canary's thread.
        version: which version to ask, and whose answers to others count; `NOT_CALLED` for none. None stays with what
            was said last, or before that leaves it to Triton, which takes the highest.
    """

    def __init__(
        self,
        api: HttpApi,
        model: str,
        settings: CanarySettings,
        found: Callable[[str, Finding], None],
        version: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Nothing is asked before `start`."""
        self._version = version
        self.model, self._api, self._settings, self._found = model, api, settings, found
        self.last = Finding()
        self._asked: int | None = None
        self._body: dict[str, Any] | None = None
        self._stuck_at: int | None = None
        self._loads = 0
        self._answered, self._moved = -1, time.monotonic()
        self._refused_since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"canary {model}", daemon=True)

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a request in flight is not waited for."""
        self._closed.set()

    def forget(self) -> None:
        """The model was loaded anew: what was found before says nothing of it."""
        self._loads += 1
        self._stuck_at, self._refused_since, self.last = None, None, Finding()

    def ask(self) -> Finding:
        """Ask once."""
        began, loads = time.monotonic(), self._loads
        try:
            self._choose()
            if self._asked == NOT_CALLED:
                return self._again(Finding("unknown", 0.0, "the served version does not call it", 0, began))
            before = self._progress()
            if before == self._stuck_at:
                return self._again(Finding("hung", self._settings.deadline_s, "it still computes nothing", 0, began))
            self._stuck_at = None
            try:
                health, text = self._infer()
            except TimeoutError:
                health, text = self._after_silence(before, loads)
        except (ControlError, TimeoutError) as error:
            health, text = "failed", str(error) or "its statistics do not come in time"
        if health != "busy":
            self._refused_since = None
        return self._again(Finding(health, time.monotonic() - began, text, 0, began))

    def _choose(self) -> None:
        """Find out which version to ask; what was found of another one says nothing of it."""
        version = self._version()
        if version is not None and version != self._asked:
            self._asked, self._body, self._answered = version, None, -1
            self._stuck_at, self._refused_since, self.last = None, None, Finding()

    def _progress(self) -> int:
        """Requests that were answered since the load; notes when that last changed."""
        answered = self._api.answered(self.model, self._asked)
        if answered != self._answered:
            self._answered, self._moved = answered, time.monotonic()
        return answered

    def _infer(self) -> tuple[Health, str]:
        if self._body is None:
            self._body = self._request()
        path = f"{model_path(self.model, self._asked)}/infer"
        status, answer = self._api.ask("POST", path, self._body, timeout_s=self._settings.deadline_s)
        if status == 200:
            return "ok", ""
        if status != 503 or "not ready" in message_of(answer):
            return "failed", message_of(answer)
        return self._after_refusal(message_of(answer))

    def _after_refusal(self, message: str) -> tuple[Health, str]:
        """Too much to do, or a queue that rejects in front of a model that computes nothing any more?"""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        self._progress()
        if now - max(self._refused_since, self._moved) < self._settings.deadline_s:
            return "busy", message
        return "hung", f"{message}, and nobody got an answer for {self._settings.deadline_s:g} s"

    def _after_silence(self, before: int, loads: int) -> tuple[Health, str]:
        """A long queue, or a model that computes nothing any more?"""
        now = self._progress()
        waited = f"no answer in {self._settings.deadline_s:g} s"
        if now > before:
            return "busy", f"{waited}, but {now - before} others got one"
        if now < before:  # a promote wrote its configuration anew
            return "busy", f"{waited}, but it was loaded anew meanwhile"
        if self._version() not in (None, self._asked):
            return "unknown", "another version is served by now"
        if loads == self._loads:
            self._stuck_at = now
        return "hung", f"{waited}, and nobody else got one"

    def _request(self) -> dict[str, Any]:
        """The smallest request that a model takes, from its own metadata."""
        status, answer = self._api.ask("GET", model_path(self.model))
        if status != 200:
            raise UnreachableError(f"{self.model} has no metadata: {message_of(answer)}")
        inputs = [smallest_input(tensor) for tensor in answer["inputs"]]
        options = {"priority": 1, "timeout": int(self._settings.deadline_s * 1e6)}
        # A lane has neither levels nor timeouts: Triton ignores both there.
        outputs = [{"name": answer["outputs"][0]["name"]}]
        return {"inputs": inputs, "parameters": options, "outputs": outputs}

    def _again(self, finding: Finding) -> Finding:
        times = self.last.times + 1 if self.last.health == finding.health else 1
        self.last = replace(finding, times=times, version=self._asked or None)
        return self.last

    def _watch(self) -> None:
        while not self._closed.wait(self._settings.every_s):
            try:
                finding = self.ask()
                if not self._closed.is_set():
                    self._found(self.model, finding)
            except Exception:  # the watch is worth more than one question
                _log.exception("a canary of %s failed", self.model)


def smallest_input(tensor: dict[str, Any]) -> dict[str, Any]:
    """One row of an input of an entry (a text) or of a lane (one token, and no second text), as JSON."""
    shape: Sequence[int] = [1 if size < 0 else int(size) for size in tensor["shape"]]
    count = 1
    for size in shape:
        count *= size
    # `length` and `segment_start` are 1, the token itself may be any.
    value: Any = "canary" if tensor["datatype"] == "BYTES" else int(tensor["name"] != "input_ids")
    return {"name": tensor["name"], "datatype": tensor["datatype"], "shape": list(shape), "data": [value] * count}
