"""An HTTP server in this process that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Asked:
    """A request: `headers` in lower case."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        """What its body says; None without one."""
        return json.loads(self.body) if self.body else None


@contextmanager
def playing(
    answer: Callable[[Asked], tuple[int, object]], *, address: str = HOST, port: int = 0, content_type: str = ""
) -> Iterator[int]:
    """Runs a server; yields its port. A client that goes away is no error.

    Args:
        answer: gives status and body of each answer, from the threads of a server: bytes and text as they are, None for
            none, all else as JSON.
        address: where it listens.
        port: there; 0 for a free one.
        content_type: of every answer.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, given = answer(Asked(self.command, self.path, body, headers))
            text = given if isinstance(given, str | bytes) else b"" if given is None else json.dumps(given)
            data = text.encode() if isinstance(text, str) else text
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if content_type:
                self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True  # kept connections do not hold the end up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
