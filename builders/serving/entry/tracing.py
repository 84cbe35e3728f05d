"""Spans inside the entry, told to an OpenTelemetry collector: `tokenise`, and each call of a lane.

Triton makes the spans of a request and of the entry as a whole; what happens inside, it cannot know. It would make
spans of a lane if the call carried `trace=request.trace()`, but a trace ends with its request, and texts that are
answered late are sent to their lane after that: tritonserver 2.51 then ends with a segmentation fault. So the entry
keeps the request's place in its trace, which is text, and makes these spans itself.

Protocol: OTLP over HTTP in its JSON form, as Triton sends it
(https://opentelemetry.io/docs/specs/otlp/#otlphttp, "JSON Protobuf Encoding").
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Where spans go, and how they are named: variables of OpenTelemetry's own specification.
URL_VARIABLE, SERVICE_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_INTERNAL, _CLIENT = 1, 3

Attributes = Mapping[str, str | int]


@dataclass(frozen=True)
class Parent:
    """A place in a trace.

    Attributes:
        trace: the trace, 32 hexadecimal digits.
        span: the span that new ones belong to, 16 hexadecimal digits.
    """

    trace: str
    span: str


def read_parent(context: str | None) -> Parent | None:
    """The place that Triton's `request.trace().get_context()` tells; None for a request that is not traced.

    Args:
        context: JSON with `traceparent`, as https://www.w3.org/TR/trace-context/ has it, or None.
    """
    if not context:
        return None
    try:
        found = _PARENT.fullmatch(json.loads(context)["traceparent"])
    except (ValueError, KeyError, TypeError):
        return None
    return Parent(*found.groups()) if found else None


class Tracer:
    """Collects spans and sends them, in a thread of its own; a request never waits for the collector.

    Args:
        url: of the collector, with its path (`http://collector:4318/v1/traces`).
        service: name of this service in the traces.
        failed: told the first error of a row of them, and how many spans were lost.
        interval_s: seconds between two sendings.
        most: spans that may wait; what comes beyond is lost.
        timeout_s: seconds for one sending.
    """

    def __init__(
        self,
        url: str,
        service: str,
        failed: Callable[[str], None],
        interval_s: float = 1.0,
        most: int = 4096,
        timeout_s: float = 2.0,
    ):
        """See the class; starts the thread."""
        self._url, self._service, self._failed = url, service, failed
        self._interval, self._timeout, self._most = interval_s, timeout_s, most
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._ill = False
        self._lock = threading.Lock()
        self._there, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracer", daemon=True)
        self._thread.start()

    def add(
        self,
        name: str,
        parents: Iterable[Parent | None],
        began_ns: int,
        ended_ns: int,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
        calls: bool = False,
    ) -> None:
        """One span for each request that is traced and had a part in this piece of work.

        Args:
            name: of the span.
            parents: a request's place in its trace, None where it is not traced; the same one counts once.
            began_ns: nanoseconds since 1970.
            ended_ns: nanoseconds since 1970.
            attributes: what else to say of it.
            error: what went wrong.
            calls: another model was called.
        """
        for parent in {parent for parent in parents if parent is not None}:
            span: dict[str, Any] = {
                "traceId": parent.trace,
                "spanId": secrets.token_hex(8),
                "parentSpanId": parent.span,
                "name": name,
                "kind": _CLIENT if calls else _INTERNAL,
                "startTimeUnixNano": str(began_ns),
                "endTimeUnixNano": str(ended_ns),
                "attributes": _pairs(attributes or {}),
                "status": {"code": 2, "message": error} if error else {},
            }
            with self._lock:
                if len(self._waiting) < self._most:
                    self._waiting.append(span)
                else:
                    self._lost += 1
            self._there.set()

    def close(self) -> None:
        """Send what waits, once, and end the thread."""
        self._closed.set()
        self._there.set()
        self._thread.join(self._timeout + 5)

    def _work(self) -> None:
        while not self._closed.is_set():
            self._there.wait()
            self._closed.wait(self._interval)
            self._there.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        with self._lock:
            spans, lost = list(self._waiting), self._lost
            self._waiting.clear()
            self._lost = 0
        if not spans:
            return
        try:
            request = urllib.request.Request(  # noqa: S310  (the operator's own address)
                self._url, self._body(spans), {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=self._timeout):  # noqa: S310
                pass
        except Exception as error:  # a collector is never worth a request
            if not self._ill:
                self._failed(f"{len(spans) + lost} spans were lost: {self._url}: {type(error).__name__}: {error}")
            self._ill = True
            return
        if lost and not self._ill:
            self._failed(f"{lost} spans were lost: more than {self._most} waited; trace fewer requests (TRACE_RATE)")
        self._ill = bool(lost)

    def _body(self, spans: list[dict[str, Any]]) -> bytes:
        scope = {"scope": {"name": "lanes_entry"}, "spans": spans}
        resource = {"attributes": _pairs({"service.name": self._service})}
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}).encode()


def open_tracer(environment: Mapping[str, str], failed: Callable[[str], None]) -> Tracer | None:
    """What the environment asks for: spans to OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or None without it.

    Args:
        environment: of the process.
        failed: told what went wrong.
    """
    url = environment.get(URL_VARIABLE, "")
    if not url.startswith(("http://", "https://")):
        return None
    return Tracer(url, environment.get(SERVICE_VARIABLE, "encoder-lanes"), failed)


def _pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for key, value in attributes.items()
    ]
