"""What each request passes: its key, its limits, its body, the work, the answer; then the log and the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from clients.door.bodies import ClientGone, read_body
from clients.door.call import Call, Door
from clients.door.keys import ANYBODY, Key
from clients.door.log import LOGGER
from clients.door.problems import SERVER, Dialect, Problem, from_encoder_error, overloaded
from clients.errors import EncoderError

_T = TypeVar("_T")
GONE = 499

Handler = Callable[[Call, bytes], Coroutine[Any, Any, bytes]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application for one path: admits, reads, computes, answers, counts."""

    door: Door
    route: str
    handler: Handler
    """Gets the body, gives the JSON of the answer."""
    dialect: Dialect = "openai"
    """Form of the errors."""
    body: bool = True
    """Whether the request has one and computes; else it is a question, which no rate limits."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        door, call = self.door, Call(self.door, self.route, Headers(scope=scope), self.dialect)
        call.path = scope.get("path_params", {})
        door.metrics.in_flight.labels(self.route).inc()
        door.in_flight += 1
        status, problem = 500, None
        try:
            answer = await self._answered(call, receive)
            status = 200
            await _send(send, 200, answer, call)
        except ClientGone:
            status = GONE
        except asyncio.CancelledError:
            status = GONE
            raise
        except Problem as known:
            problem = known
        except EncoderError as error:
            problem = from_encoder_error(error, door.settings.retry_after_s)
        except Exception:
            logging.getLogger(LOGGER).exception("request failed", extra={"door": {"request_id": call.id}})
            problem = Problem(500, "internal_error", f"the door failed; request {call.id}", type_=SERVER)
        finally:
            door.in_flight -= 1
            door.bytes_held -= call.bytes_in
            door.metrics.in_flight.labels(self.route).dec()
            record(call, problem.status if problem else status, problem)
        if problem is not None:
            await send_problem(send, problem, call)

    async def _answered(self, call: Call, receive: Receive) -> bytes:
        door = self.door
        call.key = admit_key(door, call.headers)
        if not self.body:
            return await self.handler(call, b"")
        call.read_priority()
        if door.in_flight > door.settings.max_in_flight:
            raise overloaded("the door has too many requests; try again later", door.settings.retry_after_s)
        door.limits.admit(call.key, time.monotonic())
        settings = door.settings
        body = await read_body(receive, call.headers, settings.max_body_bytes, settings.body_timeout_s, call.hold)
        return await while_connected(receive, self.handler(call, body))


def admit_key(door: Door, headers: Headers) -> Key:
    """The key of a request: `Authorization: Bearer KEY`.

    Raises:
        Problem: 401.
    """
    if door.keys is None:
        return ANYBODY
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    key = door.keys.find(presented.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        raise Problem(401, "invalid_api_key", "no valid API key; send the header `Authorization: Bearer KEY`")
    return key


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Awaits the work, and cancels it when the client goes away; with it its gRPC calls.

    Raises:
        ClientGone: the client went first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, body: bytes, call: Call, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", call.id.encode()),
        *extra,
    ]
    if call.cut:
        headers.append((b"x-cut-tokens", str(call.cut).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_problem(send: Send, problem: Problem, call: Call) -> None:
    """Answers with an error; the connection closes where the rest of the body would have to be read first."""
    extra = problem.headers()
    if problem.status in (408, 413):
        extra.append((b"connection", b"close"))
    await _send(send, problem.status, orjson.dumps(problem.body(call.dialect)), call, extra)


def record(call: Call, status: int, problem: Problem | None) -> None:
    """One line in the log, and the metrics."""
    seconds = time.monotonic() - call.began
    metrics, labels = call.door.metrics, (call.route, str(status), call.priority)
    metrics.requests.labels(*labels).inc()
    metrics.seconds.labels(*labels).observe(seconds)
    if status == 200 and call.texts:
        metrics.texts.labels(call.model).inc(call.texts)
        metrics.tokens.labels(call.model).inc(call.tokens)
        metrics.cut.labels(call.model).inc(call.cut)
    line: dict[str, Any] = {
        "request_id": call.id,
        "key": call.key.name,
        "route": call.route,
        "status": status,
        "ms": round(seconds * 1000, 2),
        "model": call.model,
        "priority": call.priority,
        "texts": call.texts,
        "tokens": call.tokens,
        "cut": call.cut,
        "bytes_in": call.bytes_in,
    }
    if call.trace_id is not None:
        line["trace_id"] = call.trace_id
    if problem is not None:
        line["code"] = problem.code
        if problem.code == "rate_limit_exceeded":
            metrics.limited.labels(problem.type_).inc()
        if problem.detail and status >= 500:
            line["error"] = problem.detail
    logging.getLogger(LOGGER).log(logging.ERROR if status >= 500 else logging.INFO, "request", extra={"door": line})


async def breathe(at: int) -> None:
    """Lets other requests go on every 32 rows of a long answer that is being written."""
    if at and at % 32 == 0:
        await asyncio.sleep(0)
