"""The launcher's own HTTP port: what it knows of the models, for orchestrators and for Prometheus.

Paths and names are those of the supervisor's port (`serve --health-port`, builders/health.py), so that one dashboard
and one set of alerts fit both. Standard library alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from repository import LaunchError
from watch import ModelState


@contextmanager
def endpoint(
    port: int, started: float, states: Callable[[], Mapping[str, ModelState]], host: str = ""
) -> Iterator[int]:
    """Answer on a port of its own as long as the block runs; yields the port.

    GET /healthz: 503 when a model is in a state that only a new start heals, else 200. GET /readyz: 200 when every
    model answers and no process of one is dead, else 503. Both give JSON with the reason. GET /metrics: for Prometheus.

    Args:
        port: 0 takes a free one.
        started: when the launcher was started, seconds since 1970.
        states: asked for each request.
        host: the address to listen on; all by default, as tritonserver does.

    Raises:
        LaunchError: the port cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        # A client that sends nothing must not hold a thread for ever.
        timeout = 5.0

        def do_GET(self) -> None:
            """Answer one request."""
            now = states()
            match self.path.partition("?")[0]:
                case "/healthz":
                    self._send(503 if any(state.fatal for state in now.values()) else 200, status_text(now))
                case "/readyz":
                    self._send(200 if all(state.ready for state in now.values()) else 503, status_text(now))
                case "/metrics":
                    self._send(200, metrics_text(now, started), "text/plain; version=0.0.4")
                case _:
                    self._send(404, '{"error": "ask for /healthz, /readyz or /metrics"}')

        def _send(self, code: int, text: str, kind: str = "application/json") -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: somebody asks every few seconds."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise LaunchError(f"HEALTH_PORT {port} cannot be had: {error}: give a free port, or 0 for none") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.1,), name="endpoint", daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def status_text(states: Mapping[str, ModelState]) -> str:
    """The models as JSON, each with what is wrong with it."""
    models = [
        {
            "model": name,
            "ready": state.ready,
            "dead": state.dead,
            "canary": state.canary,
            "canary_seconds": round(state.canary_s, 4),
            "text": state.fatal or state.said,
        }
        for name, state in sorted(states.items())
    ]
    return json.dumps({"ready": all(state.ready for state in states.values()), "models": models})


def metrics_text(states: Mapping[str, ModelState], started: float) -> str:
    """The same in Prometheus' text format, and when the launcher was started."""
    rows: tuple[tuple[str, str, Callable[[ModelState], float]], ...] = (
        ("ready", "1 when the model answers and none of its processes is dead", lambda state: state.ready),
        ("dead_processes", "Model processes that died and are not replaced yet", lambda state: state.dead),
        ("canary_seconds", "How long the last canary took, seconds", lambda state: state.canary_s),
    )
    lines = []
    for name, help_text, value in rows:
        full = f"encoder_lanes_supervisor_{name}"
        lines += [f"# HELP {full} {help_text}", f"# TYPE {full} gauge"]
        lines += [f'{full}{{model="{model}"}} {float(value(state)):g}' for model, state in sorted(states.items())]
    start = "encoder_lanes_launcher_start_time_seconds"
    lines += [f"# HELP {start} Start of the launcher, seconds since 1970", f"# TYPE {start} gauge"]
    return "\n".join([*lines, f"{start} {started:.3f}"]) + "\n"
