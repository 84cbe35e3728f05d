"""The container's launcher and the supervisor, which share no code, judge one played server alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from builders.canary import Canary, CanarySettings
from builders.http_api import HttpApi
from builders.ports import free_ports
from builders.supervisor import Supervisor, SupervisorSettings
from tests.operations.container import script
from tests.operations.played import NATIVE, TENSORS, Played, look, playing, watching

calls, triton_http, watch = script("calls"), script("triton_http"), script("watch")

#: By model: what its canary found and whether it is ready. And the models that are ended, or only a new start heals.
Judgement = tuple[dict[str, tuple[str, bool]], set[str]]


def test_a_bad_version_that_a_rollback_left_loaded_is_not_asked(played: Played) -> None:
    """The entry serves version 1 again; Triton would take 2, the highest."""
    played.versions["encoder_32"] = ["1", "2"]
    found = watching(played, *NATIVE)
    look(found)
    found.ask_all()
    assert played.paths == ["/v2/models/encode/infer", "/v2/models/encoder_32/versions/1/infer"]
    # And after a promote the new one.
    played.versions["encode"] = ["1", "2"]
    found.ask_all()
    assert played.paths[-1] == "/v2/models/encoder_32/versions/2/infer"


def test_what_is_called_is_read_from_what_triton_has_loaded(played: Played) -> None:
    triton = triton_http.Triton(played.port)
    assert calls.calls_of("encode", triton) == {"encoder_32": 1}
    assert calls.calls_of("ensemble_32", triton) == {"tokenize_32": 1, "encoder_32_queued": 1}
    assert calls.calls_of("encoder_32", triton) == {}
    played.versions["encode"] = []
    assert calls.calls_of("encode", triton) is None
    assert calls.calls_of("encode", triton_http.Triton(free_ports().http)) is None


Rounds = list[dict[str, Any] | float]
NAMES = ("encode", "encoder_32")
DEADLINE_S = 0.25


class Judging(Supervisor):
    """The supervisor over a played server: which models it would have ended."""

    def __init__(self, played: Played, folder: Path) -> None:
        settings = SupervisorSettings(canary=CanarySettings(0.0, DEADLINE_S))
        api = HttpApi("127.0.0.1", played.port)
        super().__init__(folder, NAMES, api, lambda: 1, settings)
        self._started = True
        self._canaries = [Canary(api, name, settings.canary, self._found) for name in NAMES]
        self.ended: set[str] = set()

    def ask_all(self) -> None:
        self.ended.clear()
        for canary in self._canaries:
            self._found(canary.model, canary.ask())

    def _end(self, name: str, *_: object) -> None:
        self.ended.add(name)


def play(played: Played, rounds: Rounds, ask_all: Callable[[], None]) -> None:
    """A number is a pause, in deadlines; else what the server does from then on, followed by a round of canaries."""
    for one in rounds:
        if isinstance(one, float):
            time.sleep(one * DEADLINE_S)
        else:
            vars(played).update(one)
            ask_all()


def by_the_launcher(rounds: Rounds) -> Judgement:
    with playing() as played:
        played.deadline_s = DEADLINE_S
        found = watching(played, *NATIVE)
        look(found)
        play(played, rounds, found.ask_all)
        states = found.states().items()
        return {name: (state.canary, state.ready) for name, state in states}, set(found.fatal())


def by_the_supervisor(rounds: Rounds, folder: Path) -> Judgement:
    with playing() as played:
        played.deadline_s = DEADLINE_S
        found = Judging(played, folder)
        play(played, rounds, found.ask_all)
        return {one.model: (one.canary, one.ready) for one in found.status().models}, found.ended


FINE = ("ok", True)
OK: dict[str, Any] = {}
ILL = {"status": 500, "error": "the engine is broken"}
FULL = {"status": 503, "error": "Exceeds maximum queue size"}
FROZEN = {"status": 500, "error": "Stub process 'encoder_32_0_0' is not healthy."}


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([OK], ({"encode": FINE, "encoder_32": FINE}, set())),
        # An entry that hangs, with a lane that answers: perhaps the lane was only slow; then it is the entry.
        ([{"silent": {"encode"}}], ({"encode": ("hung", False), "encoder_32": FINE}, set())),
        ([{"silent": {"encode"}}, 2.2, {}], ({"encode": ("hung", False), "encoder_32": FINE}, {"encode"})),
        # An entry that hangs because its lane does.
        ([{"silent": {"encode", "encoder_32"}}, 2.2, {}], (dict.fromkeys(TENSORS, ("hung", False)), {"encoder_32"})),
        ([{"silent": {"encoder_32"}}], ({"encode": FINE, "encoder_32": ("hung", False)}, {"encoder_32"})),
        ([{"silent": {"encoder_32"}}, {"silent": set(), "answered": 1}], (dict.fromkeys(TENSORS, FINE), set())),
        ([ILL], (dict.fromkeys(TENSORS, ("failed", True)), set())),
        ([ILL, ILL], (dict.fromkeys(TENSORS, ("failed", False)), set())),
        # The process of the lane does not move; the entry passes its words on.
        ([FROZEN, FROZEN], (dict.fromkeys(TENSORS, ("failed", False)), {"encoder_32"})),
        ([FULL], (dict.fromkeys(TENSORS, ("busy", True)), set())),
        ([FULL, 1.1, FULL], (dict.fromkeys(TENSORS, ("hung", False)), {"encoder_32"})),
        ([FULL, 1.1, {**FULL, "answered": 1}], (dict.fromkeys(TENSORS, ("busy", True)), set())),
        ([FULL, ILL, 1.1, FULL], (dict.fromkeys(TENSORS, ("busy", True)), set())),
    ],
)
def test_launcher_and_supervisor_judge_the_same_models_alike(
    tmp_path: Path, rounds: Rounds, expected: Judgement
) -> None:
    with ThreadPoolExecutor(2) as pool:
        launchers, supervisors = pool.submit(by_the_launcher, rounds), pool.submit(by_the_supervisor, rounds, tmp_path)
    assert launchers.result() == expected
    assert supervisors.result() == expected


def test_launcher_and_supervisor_ask_as_often_and_wait_as_long() -> None:
    ours, theirs = watch.WatchSettings(), CanarySettings()
    assert (ours.canary_s, ours.deadline_s) == (theirs.every_s, theirs.deadline_s)
