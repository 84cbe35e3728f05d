"""The supervisor's own HTTP endpoint: what a container's health check, an orchestrator and Prometheus ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from builders.errors import ServerError


@dataclass(frozen=True)
class ModelStatus:
    """One model, as the supervisor sees it.

    Attributes:
        model: the Triton model.
        ready: every process of it lives, and its last canary was answered.
        dead: processes that died and are not replaced yet.
        heals: loads that replaced dead processes, since the start.
        crash_loop: it died again and again: it is healed more and more slowly.
        canary: see `canary.Health`.
        canary_seconds: how long its last canary took.
        text: what is wrong with it, for people.
    """

    model: str
    ready: bool
    dead: int = 0
    heals: int = 0
    crash_loop: bool = False
    canary: str = "unknown"
    canary_seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Status:
    """A server, as its supervisor sees it.

    Attributes:
        alive: the server's process is there.
        ready: it is alive, all models were loaded and each of them is ready.
        models: by name.
    """

    alive: bool
    ready: bool
    models: tuple[ModelStatus, ...] = field(default_factory=tuple)


@contextmanager
def health_endpoint(host: str, port: int, status: Callable[[], Status]) -> Iterator[str]:
    """Answer on a port of its own, from a few threads, as long as the block runs; yields the URL.

    GET /healthz: 200 as long as the server's process is there, else 503. GET /readyz: 200 when every model answers and
    no process of one is dead, else 503; both with `Status` as JSON. GET /metrics: the same for Prometheus.

    Args:
        host: the address to listen on.
        port: 0 takes a free one.
        status: asked for each request.

    Raises:
        ServerError: the port cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        # A client that sends nothing must not hold a thread for ever.
        timeout = 5.0

        def do_GET(self) -> None:
            """Answer one request."""
            now = status()
            match self.path.partition("?")[0]:
                case "/healthz":
                    self._send(200 if now.alive else 503, json.dumps(asdict(now)), "application/json")
                case "/readyz":
                    self._send(200 if now.ready else 503, json.dumps(asdict(now)), "application/json")
                case "/metrics":
                    self._send(200, metrics_text(now), "text/plain; version=0.0.4")
                case _:
                    self._send(404, '{"error": "ask for /healthz, /readyz or /metrics"}', "application/json")

        def _send(self, code: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a probe comes every few seconds."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ServerError(
            f"the health port cannot be had: {error.strerror or error}", value=f"{host}:{port}",
            remedy="set --health-port or HEALTH_PORT to a free port",
        ) from error  # fmt: skip
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def metrics_text(status: Status) -> str:
    """`Status` in Prometheus' text format."""
    lines = []
    rows: tuple[tuple[str, str, str, Callable[[ModelStatus], float]], ...] = (
        ("ready", "gauge", "1 when the model answers and none of its processes is dead", lambda m: m.ready),
        ("dead_processes", "gauge", "Model processes that died and are not replaced yet", lambda m: m.dead),
        ("heals_total", "counter", "Loads that replaced dead model processes", lambda m: m.heals),
        ("crash_loop", "gauge", "1 while a model dies again and again", lambda m: m.crash_loop),
        ("canary_seconds", "gauge", "How long the last canary took, seconds", lambda m: m.canary_seconds),
    )
    for name, kind, help_text, value in rows:
        full = f"encoder_lanes_supervisor_{name}"
        lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
        lines += [f'{full}{{model="{model.model}"}} {float(value(model)):g}' for model in status.models]
    return "\n".join(lines) + "\n"
