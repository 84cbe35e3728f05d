"""Draining several entries: each is unloaded at once, and all of them are waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from builders.drain import drain
from builders.http_api import HttpApi
from tests.tools.played import HOST, playing


@dataclass
class Repository:
    """A server's model repository API: how many looks at the index each unloaded model still takes to finish."""

    busy_for: dict[str, int]
    refused: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)
    port: int = 0

    def answer(self, path: str) -> tuple[int, object]:
        if path.endswith("/unload"):
            model = path.split("/")[-2]
            self.asked.append(model)
            return (400, {"error": "no"}) if model in self.refused else (200, None)
        states = {}
        for model, looks in self.busy_for.items():
            states[model] = "READY" if model not in self.asked or model in self.refused else "UNLOADING"
            if model in self.asked and looks <= 0 and model not in self.refused:
                states[model] = "UNAVAILABLE"
            self.busy_for[model] = looks - (model in self.asked)
        return 200, [{"name": model, "version": "1", "state": state} for model, state in states.items()]


@pytest.fixture
def repository() -> Iterator[Repository]:
    served = Repository({})
    with playing(lambda asked: served.answer(asked.path)) as served.port:
        yield served


def test_all_entries_unloaded_at_once_and_the_slowest_waited_for(repository: Repository) -> None:
    repository.busy_for = {"encode_a": 0, "encode_b": 3, "encode_other": 9}
    assert drain(HttpApi(HOST, repository.port), ["encode_a", "encode_b"], 10, threading.Event())
    assert repository.asked == ["encode_a", "encode_b"]
    # The fourth look found it finished; a model that is nobody's to drain is not waited for.
    assert repository.busy_for["encode_b"] == -1


def test_the_others_waited_for_when_one_may_not_be_unloaded(repository: Repository) -> None:
    repository.busy_for, repository.refused = {"encode_a": 0, "encode_b": 2}, ("encode_a",)
    assert not drain(HttpApi(HOST, repository.port), ["encode_a", "encode_b"], 10, threading.Event())
    assert repository.busy_for["encode_b"] == -1


def test_given_up_after_the_time_that_was_set(repository: Repository) -> None:
    repository.busy_for = {"encode_a": 1000}
    assert not drain(HttpApi(HOST, repository.port), ["encode_a"], 0.3, threading.Event())
