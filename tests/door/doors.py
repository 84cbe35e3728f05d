"""A door in this process, on a port of its own, and plain HTTP to call it with."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from clients.door.app import make_app
from clients.door.command import server_config
from clients.door.settings import DoorSettings
from tests.tools.waiting import until


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return dict(self.json["error"])


@dataclass(frozen=True)
class RunningDoor:
    """Where it listens."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.call("GET", path, **headers)

    def post(self, path: str, value: Any, **headers: str) -> Reply:
        return self.call("POST", path, json.dumps(value).encode(), **headers)

    def embed(self, text: Any = "a text", **headers: str) -> Reply:
        return self.post("/v1/embeddings", {"model": "encode", "input": text}, **headers)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        page = self.get("/metrics").body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@contextmanager
def running(triton: str, **settings: Any) -> Iterator[RunningDoor]:
    """Serves until the block ends.

    Args:
        triton: its gRPC endpoint.
        settings: of DoorSettings.
    """
    told = DoorSettings(triton=triton, **settings)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_config(make_app(told), told))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert until(lambda: server.started)
            yield RunningDoor(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
