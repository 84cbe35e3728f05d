"""A server that is played, for the launcher's watch: it says what the test wants of two models, and takes its time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.operations.container import script

repository = script("repository")
ENTRY, LANE = repository.Model("encode", True, 2), repository.Model("encoder_32", False, 1)
#: The same on a backend without processes.
NATIVE = (repository.Model("encode", True, 0), repository.Model("encoder_32", False, 0))
DEADLINE_S = 0.4
TENSORS = {
    "encode": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
    "encoder_32": [
        {"name": "input_ids", "datatype": "INT32", "shape": [-1, 32]},
        {"name": "length", "datatype": "INT32", "shape": [-1, 1]},
    ],
}


#: What Triton tells of an entry and of an ensemble, as far as it is looked at.
CONFIGS: dict[str, dict[str, Any]] = {
    "encode": {"parameters": {"entry": {"string_value": json.dumps({"buckets": [{"model": "encoder_32"}]})}}},
    "ensemble_32": {
        "ensemble_scheduling": {
            "step": [
                {"model_name": "tokenize_32", "model_version": "1"},
                {"model_name": "encoder_32_queued", "model_version": "1"},
            ]
        }
    },
}


@dataclass
class Played:
    """A server that does what the test says.

    Attributes:
        deadline_s: how long its canaries wait, seconds.
        loaded: models that are ready.
        processes: that each of its models should have.
        status: of an answer to a request.
        delay_s: before it, seconds.
        error: its text.
        others: requests of others that are answered while one of ours waits.
        answered: of all models, beside our own.
        asked: models and bodies of the requests; `paths` of the same.
        silent: models that answer nobody.
        versions: that a model has loaded; 1 where nothing is said.
        own: answered requests of ours, by model.
    """

    port: int = 0
    deadline_s: float = DEADLINE_S
    loaded: set[str] = field(default_factory=lambda: {"encode", "encoder_32"})
    processes: int = 0
    status: int = 200
    delay_s: float = 0.0
    error: str = ""
    others: int = 0
    answered: int = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    versions: dict[str, list[str]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    own: Counter[str] = field(default_factory=Counter)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        model = path.split("/")[3]
        if path.endswith("/ready"):
            return (200 if model in self.loaded else 400), {}
        if path.endswith("/stats"):
            count = self.answered + self.own[model]
            return 200, {"model_stats": [{"inference_stats": {"success": {"count": count}}}]}
        if path.endswith("/infer"):
            self.asked.append((model, body))
            self.paths.append(path)
            delay_s = 2 * self.deadline_s if model in self.silent else self.delay_s
            time.sleep(delay_s)
            self.answered += self.others
            self.own[model] += self.status == 200 and delay_s < self.deadline_s
            return self.status, {"error": self.error}
        if path.endswith("/config"):
            return 200, {
                "backend": "python" if self.processes else "tensorrt",
                "instance_group": [{"count": self.processes}, {"count": self.processes, "gpus": [0, 1]}],
                **CONFIGS.get(model, {}),
            }
        versions = self.versions.get(model, ["1"])
        return 200, {"versions": versions, "inputs": TENSORS.get(model, []), "outputs": [{"name": "EMBEDDING"}]}


@contextmanager
def playing() -> Iterator[Played]:
    """A played server on a port of its own, until the block ends."""
    server = Played()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, body: Any) -> None:
            status, answer = server.answer(self.path, body)
            data = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def watching(played: Played, *models: Any) -> Any:
    """A watch that looks when the test says so."""
    watch = script("watch")
    return watch.Watch(lambda: models or (ENTRY, LANE), played.port, watch.WatchSettings(2.0, 10.0, played.deadline_s))


def look(found: Any) -> None:
    """At a server without model processes: where there should be some, all are missing."""
    found.look(os.getpid())
