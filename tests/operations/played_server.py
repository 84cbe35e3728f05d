"""A server that does what a test says, and a launcher's watch of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.operations.container import script
from tests.tools.played import playing

watch, repository = script("watch"), script("repository")

ENTRY, LANE = repository.Model("encode", True, 2), repository.Model("encoder_32", False, 1)
DEADLINE_S = 0.4
TENSORS = {
    "encode": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
    "tokenize_32": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
    "encoder_32": [
        {"name": "input_ids", "datatype": "INT32", "shape": [-1, 32]},
        {"name": "length", "datatype": "INT32", "shape": [-1, 1]},
    ],
    "encoder_64": [{"name": "input_ids", "datatype": "INT32", "shape": [-1, 64]}],
}


@dataclass
class Played:
    """A server that does what the test says.

    Attributes:
        loaded: models that are ready.
        processes: that each of its models should have.
        status: of an answer to a request.
        delay_s: before it, seconds.
        error: its text.
        others: requests of others that are answered while one of ours waits.
        versions: of each model that are loaded; of others 1.
        lanes: that the entry's configuration names.
        silent: a version that never answers.
        answered_by: requests that a version has answered, beside `answered`.
        while_asked: called for each of our requests.
    """

    port: int = 0
    loaded: set[str] = field(default_factory=lambda: {"encode", "encoder_32"})
    processes: int = 0
    status: int = 200
    delay_s: float = 0.0
    error: str = ""
    others: int = 0
    versions: dict[str, list[str]] = field(default_factory=dict)
    lanes: tuple[str, ...] = ("encoder_8",)
    silent: str = ""
    answered_by: dict[str, int] = field(default_factory=dict)
    while_asked: Callable[[], None] = lambda: None
    answered: int = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/metrics":
            return 200, {}
        model = path.split("/")[3]
        if path.endswith("/ready"):
            return (200 if model in self.loaded else 400), {}
        if path.endswith("/stats"):
            version = path.split("/")[5] if "/versions/" in path else ""
            if version and version not in self.versions.get(model, ["1"]):
                return 400, {"error": "unknown version"}
            counts = self.answered_by
            answered = self.answered + (counts.get(version, 0) if version else sum(counts.values()))
            return 200, {"model_stats": [{"inference_stats": {"success": {"count": answered}}}]}
        if path.endswith("/infer"):
            self.asked.append((model, body))
            self.paths.append(path)
            self.while_asked()
            if self.silent and f"/versions/{self.silent}/" in path:
                time.sleep(DEADLINE_S * 2)
                return 500, {}
            time.sleep(self.delay_s)
            self.answered += self.others + (self.status == 200 and self.delay_s < DEADLINE_S)
            return self.status, {"error": self.error}
        if path.endswith("/config"):
            return 200, {
                "backend": "python" if self.processes else "tensorrt",
                "instance_group": [{"count": self.processes}, {"count": self.processes, "gpus": [0, 1]}],
                "parameters": {"entry": {"string_value": json.dumps({"buckets": [{"model": m} for m in self.lanes]})}},
            }
        return 200, {
            "versions": self.versions.get(model, ["1"]),
            "inputs": TENSORS.get(model, []),
            "outputs": [{"name": "EMBEDDING"}],
        }


@contextmanager
def playing_server() -> Iterator[Played]:
    """Runs one."""
    server = Played()
    with playing(lambda asked: server.answer(asked.path, asked.json())) as server.port:
        yield server


def watching(played: Played, *models: Any) -> Any:
    """A watch that looks when the test says so."""
    return watch.Watch(lambda: models or (ENTRY, LANE), played.port, watch.WatchSettings(2.0, 10.0, DEADLINE_S))


def look(found: Any) -> None:
    """At a server without model processes: where there should be some, all are missing."""
    found.look(os.getpid())


NATIVE = (repository.Model("encode", True, 0), repository.Model("encoder_32", False, 0))
