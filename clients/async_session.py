"""The same connection under asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, Unpack

from clients.connection import Headers
from clients.core import ASK_S, ClientOptions, Core, Work
from clients.errors import EncoderError
from clients.failures import TransportError
from clients.model import ModelFacts
from clients.options import seconds
from clients.progress import reporter
from clients.reading import Arrays, join, read
from clients.status import ServerStatus
from clients.transports import AsyncTransport, Outcome, open_async
from clients.wire import InferRequest, Query


class AsyncSession:
    """What AsyncEncoderClient is beside its tasks; see there."""

    def __init__(self, url: str = "127.0.0.1:8001", **options: Unpack[ClientOptions]) -> None:
        """Keeps the settings; see the class."""
        self._core = Core(url, **options)
        self._transport: AsyncTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """Address of the server, as it was given."""
        return self._core.url

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls of other tasks that are under way fail with ServerUnavailable."""
        self._closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    # The server

    async def ready(self, *, deadline: float = 2.0) -> bool:
        """See EncoderClient.ready."""
        return await self._yes("ready", deadline)

    async def live(self, *, deadline: float = 2.0) -> bool:
        """See EncoderClient.live."""
        return await self._yes("live", deadline)

    async def dim(self, *, deadline: float | None = None) -> int:
        """See EncoderClient.dim."""
        return await self._dim(deadline)

    async def facts(self, *, deadline: float | None = None) -> ModelFacts:
        """See EncoderClient.facts."""
        return self._core.facts(await self._ask(self._core.query("config"), deadline))

    async def status(self, *, deadline: float | None = None, metrics: str | None = None) -> ServerStatus:
        """See EncoderClient.status."""
        core = self._core
        replies = {kind: await self._ask(core.query(kind, model=""), deadline) for kind in ("server", "statistics")}
        try:
            index = await self._ask(core.query("index"), deadline)
        except EncoderError:
            index = None
        return core.status(replies, index, metrics)

    # Driving

    async def _all(self, work: Work) -> Arrays:
        return join([arrays async for arrays in self._run(work)], self.url)

    async def _run(self, work: Work) -> AsyncGenerator[Arrays, None]:
        """Drives the exchange: sends, waits, settles; yields the answers in order."""
        exchange, transport = work.exchange, self._opened()
        outcomes: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def send(number: int, request: InferRequest) -> None:
            outcome: Outcome = TransportError("CANCELLED", "the call was cancelled on this side")
            try:
                outcome = await transport.infer(request, work.options.remaining())
            except TransportError as error:
                outcome = error
            except Exception as error:
                if not self._closed:
                    outcome = TransportError("INTERNAL", f"the request failed on this side: {error!r}")
            finally:
                # Whatever happens the loop below gets an outcome, or it would wait for ever: grpc.aio cancels the
                # tasks of its calls when the channel is closed.
                outcomes.put_nowait((number, outcome))

        try:
            with reporter(work.options.progress, len(work.texts)) as report:
                while not exchange.finished:
                    while (taken := exchange.take(time.monotonic())) is not None:
                        self._check_open()
                        tasks[taken[0]] = asyncio.create_task(send(*taken))
                    try:
                        async with asyncio.timeout(exchange.pause(time.monotonic())):
                            number, outcome = await outcomes.get()
                    except TimeoutError:
                        continue
                    del tasks[number]
                    exchange.settle(number, outcome, time.monotonic())
                    report(exchange.done_texts)
                    for answered in exchange.ordered():
                        yield read(answered, work.task, self.url)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _dim(self, deadline: float | None, headers: Headers = ()) -> int:
        core = self._core
        fixed = core.dim(await self._ask(core.query("metadata", headers=headers), deadline))
        return core.widest(await self._ask(core.query("config", headers=headers), deadline)) if fixed is None else fixed

    async def _labels(self, versions: list[str], work: Work) -> tuple[str, ...]:
        """The labels of the versions that answered; asked for once a version."""
        core, sets = self._core, []
        for version in versions:
            known = core.known_labels(version)
            if known is None:
                remaining = work.options.remaining()
                question = core.query("config", version=version, headers=work.options.headers)
                config = await self._ask(question, None if remaining is None else max(remaining, 1e-3))
                known = core.keep_labels(version, config)
            sets.append(known)
        return core.one_set(sets)

    async def _yes(self, kind: str, deadline: float) -> bool:
        self._check_open()
        try:
            reply = await self._opened().ask(self._core.query(kind), seconds("deadline", deadline))
        except TransportError as error:
            return self._core.not_ready(error)
        return bool(reply.get(kind, False))

    async def _ask(self, query: Query, deadline: float | None) -> dict[str, Any]:
        self._check_open()
        limit = ASK_S if deadline is None else seconds("deadline", deadline)
        try:
            return await self._opened().ask(query, limit)
        except TransportError as error:
            raise self._core.failed(error) from None

    def _opened(self) -> AsyncTransport:
        """The transport, made in the event loop of the first call."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._loop, self._transport = loop, open_async(self._core.address, self._core.headers)
        if self._loop is not loop:
            raise RuntimeError("the client belongs to another event loop; make one inside each asyncio.run")
        return self._transport

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed; make a new one, or call inside its `async with` block")
