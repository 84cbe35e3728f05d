"""HTTP under asyncio, with aiohttp.

Triton 2.51 does not notice that an HTTP client has gone: what was sent before a deadline passed or a call was cancelled
is computed all the same. Over gRPC it is dropped, if it is still in the queue.
"""

from __future__ import annotations

import json
import math
from typing import Any

import aiohttp

from clients.connection import Address, Headers
from clients.failures import TransportError, from_http_code
from clients.wire import JSON_LENGTH, InferAnswer, InferRequest, Query, frame, infer_path, unframe

# An idle connection is given up before the proxies on the way do so (nginx: 75 s, AWS: 60 s), or a request would meet
# one that is just being closed.
_KEEP_ALIVE_S = 30.0
_CONNECT_S = 10.0


class HttpAsync:
    """One session with its pool of kept-alive connections, as many as there are requests under way."""

    def __init__(self, address: Address, headers: Headers) -> None:
        """Prepares the session inside the running event loop; it connects at the first request."""
        self._base, self._headers = address.target, dict(headers)
        self._server_name = address.tls.server_name if address.tls else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=address.tls.context() if address.tls else True
            ),
            # No cookies, no redirects, no proxies of the environment, no decompression: what is asked is what is sent.
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )

    async def infer(self, request: InferRequest, timeout: float | None) -> InferAnswer:
        """See AsyncTransport."""
        body, headers = frame(request)
        code, answer, received = await self._request("POST", infer_path(request.model), headers, body, timeout)
        if code != 200:
            raise from_http_code(code, _message(answer))
        try:
            return unframe(answer, received.get(JSON_LENGTH))
        except ValueError as error:
            raise TransportError("INTERNAL", f"the answer cannot be read: {error}") from None

    async def ask(self, query: Query, timeout: float) -> dict[str, Any]:
        """See AsyncTransport."""
        body = b"{}" if query.method == "POST" else None
        code, answer, _ = await self._request(query.method, query.path, dict(query.headers), body, timeout)
        if query.kind in ("live", "ready"):
            if code in (200, 400, 503) or (code == 404 and query.kind == "ready"):
                return {query.kind: code == 200}
            raise from_http_code(code, _message(answer))
        if code != 200:
            raise from_http_code(code, _message(answer))
        try:
            reply = json.loads(answer)
        except ValueError as error:
            raise TransportError("INTERNAL", f"the answer is not JSON: {error}") from None
        return {"models": reply} if isinstance(reply, list) else dict(reply)  # the index is a list over HTTP

    async def close(self) -> None:
        """See AsyncTransport."""
        await self._session.close()

    async def _request(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout: float | None
    ) -> tuple[int, bytes, Any]:
        """Code, body and headers of an answer. A deadline covers everything, from connecting to the last byte."""
        if timeout is not None and timeout <= 0:  # to aiohttp it would be no limit at all
            raise TransportError("DEADLINE_EXCEEDED", "the deadline passed before the request was sent")
        # Without the threshold aiohttp rounds what is longer than 5 s up to whole seconds.
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_S, ceil_threshold=math.inf)
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=body,
                headers={**self._headers, **headers},
                timeout=limits,
                allow_redirects=False,
                server_hostname=self._server_name,
            ) as answer:
                return answer.status, await answer.read(), answer.headers
        except aiohttp.ConnectionTimeoutError as error:
            raise TransportError("UNAVAILABLE", f"failed to connect: {error}") from None
        except TimeoutError:
            raise TransportError("DEADLINE_EXCEEDED", f"no answer within {timeout or 0:.3g} s") from None
        except aiohttp.ClientSSLError as error:
            raise TransportError("UNAVAILABLE", f"TLS handshake failed: {error}") from None
        except aiohttp.ClientConnectorError as error:
            words = str(error.os_error) or type(error.os_error).__name__
            raise TransportError("UNAVAILABLE", f"failed to connect: {words}") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise TransportError("UNAVAILABLE", f"the connection was lost: {error!r}") from None
        except aiohttp.ClientError as error:
            # Not its repr, which shows the request's headers, keys among them.
            raise TransportError("UNIMPLEMENTED", f"the answer is no HTTP: {error}") from None
        except RuntimeError as error:
            if self._session.closed:
                raise TransportError("CANCELLED", "the client was closed") from error
            raise


def _message(body: bytes) -> str:
    """The text of an error: Triton's {"error": text}, or the beginning of whatever came."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace").strip()
