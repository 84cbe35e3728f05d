"""A few calls of Triton's HTTP API; standard library alone."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What the server said.

    Attributes:
        status: HTTP status; 0 where nobody answered.
        text: the body, or why nobody answered.
        timed_out: nobody answered in time; somebody may have taken the request.
    """

    status: int
    text: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether it is a success."""
        return self.status == 200

    def json(self) -> Any:
        """The body as JSON; None for an empty body or one that is no JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class Triton:
    """The server of this container.

    Args:
        port: where to ask, on 127.0.0.1.
        key: name and value of the header that opens the restricted APIs.
        timeout_s: the longest wait for one answer, seconds.
    """

    def __init__(self, port: int, *, key: tuple[str, str] | None = None, timeout_s: float = 5.0) -> None:
        """Nothing is sent yet."""
        self._port, self._timeout_s = port, timeout_s
        self._headers = {"Content-Type": "application/json"} | ({key[0]: key[1]} if key else {})

    def get(self, path: str) -> Answer:
        """GET `path`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: object = None) -> Answer:
        """POST `body` as JSON to `path`."""
        return self._ask("POST", path, json.dumps({} if body is None else body))

    def versions(self, model: str) -> list[int]:
        """Versions of a model that are loaded; none where the server does not say."""
        try:
            return [int(version) for version in self.get(f"/v2/models/{model}").json()["versions"]]
        except (KeyError, TypeError, ValueError):
            return []

    def _ask(self, method: str, path: str, body: str | None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body=body, headers=self._headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read().decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
        finally:
            connection.close()
