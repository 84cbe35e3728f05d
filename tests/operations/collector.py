"""A tiny OTLP receiver over HTTP, as an OpenTelemetry collector or Jaeger would be one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """One span of a trace, as it arrived; times in nanoseconds since 1970."""

    name: str
    service: str
    trace: str
    own: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool


@dataclass
class Collector:
    """What has arrived so far.

    Attributes:
        url: where to send spans.
        status: HTTP status of the answers.
    """

    url: str = ""
    status: int = 200
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: bytes) -> None:
        found = [
            _read(span, resource)
            for resource in json.loads(body)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]
        with self._lock:
            self._spans += found

    def spans(self, trace: str | None = None) -> list[Span]:
        with self._lock:
            return [span for span in self._spans if trace in (None, span.trace)]

    def wait(self, trace: str, names: set[str], timeout_s: float = 15.0) -> dict[str, Span]:
        """Spans of a trace by name, once `names` are among them."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = {span.name: span for span in self.spans(trace)}
            if names <= set(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"of {sorted(names)} only {sorted(span.name for span in self.spans(trace))} arrived")


def _read(span: dict[str, Any], resource: dict[str, Any]) -> Span:
    return Span(
        name=span["name"],
        service=_values(resource["resource"]["attributes"])["service.name"],
        trace=span["traceId"],
        own=span["spanId"],
        parent=span.get("parentSpanId", ""),
        began=int(span["startTimeUnixNano"]),
        ended=int(span["endTimeUnixNano"]),
        attributes=_values(span.get("attributes", [])),
        events=tuple(event["name"] for event in span.get("events", [])),
        failed=span.get("status", {}).get("code") == 2,
    )


def _values(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        values[pair["key"]] = int(value) if kind == "intValue" else value
    return values


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port, until the block ends."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if found.status == 200 and self.path == "/v1/traces":
                found.take(body)
            self.send_response(found.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
