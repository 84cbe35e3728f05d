"""Triton's HTTP API as the server's own parent uses it: one call, one connection, no proxy."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from builders.errors import ControlError, UnreachableError


@dataclass(frozen=True)
class HttpApi:
    """The HTTP front of one server.

    Not gRPC: with TLS its certificate need not name this machine's own address, and HTTP is always there.

    Attributes:
        host: the server's address, without the brackets of IPv6.
        port: its HTTP port.
        headers: sent with each call, the control key among them (`Access.http_headers`).
    """

    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Status and JSON of one call; {} for an empty body.

        Args:
            method: GET or POST.
            path: with its leading slash.
            body: sent as JSON; a POST without one sends {}.
            timeout_s: longest wait for the connection and for each part of the answer, seconds.

        Raises:
            TimeoutError: nothing came in time.
            UnreachableError: no server answers, or not in HTTP.
            ControlError: the answer is no JSON.
        """
        # http.client reads no proxy settings: this is always the machine itself.
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        data = json.dumps({} if body is None else body).encode() if method == "POST" else None
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **self.headers})
            answer = connection.getresponse()
            text = answer.read()
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"no server answers: {error}", value=f"{self.host}:{self.port}") from error
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text) if text.strip() else {}
        except ValueError:
            raise ControlError(f"{path} answers with no JSON", value=text[:80].decode(errors="replace")) from None

    def load(self, model: str, timeout_s: float = 600.0) -> None:
        """Load a model, or bring it to what its files say now; the one before serves until that is done.

        Raises:
            ControlError: with Triton's reason; UnreachableError without an answer.
            TimeoutError: not in `timeout_s` seconds.
        """
        status, answer = self.ask("POST", f"/v2/repository/models/{quote(model, safe='')}/load", timeout_s=timeout_s)
        if status != 200:
            raise ControlError(f"{model} could not be loaded: {message_of(answer)}", remedy="see the server's log")

    def is_ready(self, model: str) -> bool:
        """Whether a model is loaded; False as well where no server answers."""
        try:
            return self.ask("GET", f"{model_path(model)}/ready", timeout_s=2.0)[0] == 200
        except (ControlError, TimeoutError):
            return False

    def versions(self, model: str) -> tuple[int, ...]:
        """Versions of a model that are loaded, rising; none as well where the server does not say."""
        try:
            status, answer = self.ask("GET", model_path(model), timeout_s=2.0)
            return tuple(sorted(map(int, answer["versions"]))) if status == 200 else ()
        except (ControlError, TimeoutError, KeyError, TypeError, ValueError):
            return ()

    def lanes(self, entry: str, version: int) -> tuple[str, ...]:
        """The lanes that a loaded version of an entry calls; none as well where the server does not say."""
        try:
            status, answer = self.ask("GET", f"{model_path(entry, version)}/config", timeout_s=2.0)
            facts = json.loads(answer["parameters"]["entry"]["string_value"]) if status == 200 else {}
            return tuple(str(bucket["model"]) for bucket in facts.get("buckets", ()))
        except (ControlError, TimeoutError, AttributeError, KeyError, TypeError, ValueError):
            return ()

    def answered(self, model: str, version: int | None = None) -> int:
        """Requests that a model has answered since its load; refused ones do not count.

        Args:
            model: its name.
            version: only those of this version; None counts all that are loaded.

        Raises:
            ControlError, TimeoutError: as `ask`.
        """
        status, answer = self.ask("GET", f"{model_path(model, version)}/stats")
        if status != 200:
            raise ControlError(f"{model} has no statistics: {message_of(answer)}")
        return sum(int(version["inference_stats"]["success"]["count"]) for version in answer["model_stats"])


def model_path(model: str, version: int | None = None) -> str:
    """Where the API has a model, or one version of it."""
    return f"/v2/models/{quote(model, safe='')}" + ("" if version is None else f"/versions/{version}")


def message_of(answer: Any) -> str:
    """The words of an error of Triton's."""
    return str(answer.get("error", answer) if isinstance(answer, dict) else answer)
