"""A synchronous connection to a server: opening and closing it, questions about the server, driving calls over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
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
from clients.transports import Call, Outcome, open_sync
from clients.wire import Query


class Session:
    """What EncoderClient is beside its tasks; see there."""

    def __init__(self, url: str = "127.0.0.1:8001", **options: Unpack[ClientOptions]) -> None:
        """Prepares the connection; see the class."""
        self._core = Core(url, **options)
        self._transport = open_sync(self._core.address, self._core.headers)
        self._closed = False

    @property
    def url(self) -> str:
        """Address of the server, as it was given."""
        return self._core.url

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()

    def close(self) -> None:
        """Closes the connection; calls of other threads that are under way fail with ServerUnavailable."""
        self._closed = True
        self._transport.close()

    # The server

    def ready(self, *, deadline: float = 2.0) -> bool:
        """Says whether the server answers and has the entry model loaded.

        The lanes behind the entry are not asked; they are loaded before it.

        Args:
            deadline: how long to wait for the answer, seconds.

        Raises:
            ServerFailure: something answers that is not a Triton server, or that failed.
            InvalidInput: the server asks for a key.
        """
        return self._yes("ready", deadline)

    def live(self, *, deadline: float = 2.0) -> bool:
        """Says whether the server answers, whatever it has loaded. Arguments and errors as `ready`."""
        return self._yes("live", deadline)

    def dim(self, *, deadline: float | None = None) -> int:
        """Asks the server for the length of an embedding; computes nothing.

        Where a request may choose the length (`dimensions`), it is the longest, which a request without a choice gets.

        Args:
            deadline: how long to wait for each answer, seconds; 30 by default.

        Raises:
            ServerUnavailable: the server cannot be reached or has not loaded the model.
            DeadlineExceeded: no answer within `deadline`.
            ServerFailure: the model states no length of an output EMBEDDING.
        """
        return self._dim(deadline)

    def facts(self, *, deadline: float | None = None) -> ModelFacts:
        """Asks the server what the model is: task, labels, limits, sizes, prompts. Errors as `dim`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001") as client:
            ...     client.facts().task
            'embedding'
        """
        return self._core.facts(self._ask(self._core.query("config"), deadline))

    def status(self, *, deadline: float | None = None, metrics: str | None = None) -> ServerStatus:
        """Asks the server for its models, versions, queues and times.

        Args:
            deadline: how long to wait for each answer, seconds; 30 by default.
            metrics: text of Triton's /metrics page, which adds pending and rejected requests and quantiles
                (`clients.status.fetch_metrics`).

        Raises:
            EncoderError: as `dim`. Models that are not loaded are left out where the repository's index is restricted.
        """
        core = self._core
        replies = {
            kind: self._ask(core.query(kind, model=""), deadline)  # all models
            for kind in ("server", "statistics")
        }
        try:
            index = self._ask(core.query("index"), deadline)
        except EncoderError:
            index = None
        return core.status(replies, index, metrics)

    # Driving

    def _all(self, work: Work) -> Arrays:
        return join(list(self._run(work)), self.url)

    def _run(self, work: Work) -> Iterator[Arrays]:
        """Drives the exchange: sends, waits, settles; yields the answers in order."""
        exchange = work.exchange
        # Threads of the transport only put outcomes here; everything else happens in the caller's thread.
        outcomes: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        calls: dict[int, Call] = {}
        try:
            with reporter(work.options.progress, len(work.texts)) as report:
                while not exchange.finished:
                    while (taken := exchange.take(time.monotonic())) is not None:
                        calls[taken[0]] = self._send(taken, work, outcomes)
                    try:
                        number, outcome = outcomes.get(timeout=exchange.pause(time.monotonic()))
                    except Empty:
                        continue
                    del calls[number]
                    exchange.settle(number, outcome, time.monotonic())
                    report(exchange.done_texts)
                    for answered in exchange.ordered():
                        yield read(answered, work.task, self.url)
        finally:
            for call in calls.values():
                call.cancel()

    def _send(self, taken: tuple[int, Any], work: Work, outcomes: SimpleQueue[tuple[int, Outcome]]) -> Call:
        self._check_open()
        number, request = taken
        try:
            return self._transport.send(
                request, work.options.remaining(), lambda outcome: outcomes.put((number, outcome))
            )
        except ValueError:  # grpc's word for a channel that another thread has closed since
            self._check_open()
            raise

    def _dim(self, deadline: float | None, headers: Headers = ()) -> int:
        core = self._core
        fixed = core.dim(self._ask(core.query("metadata", headers=headers), deadline))
        return core.widest(self._ask(core.query("config", headers=headers), deadline)) if fixed is None else fixed

    def _labels(self, versions: list[str], work: Work) -> tuple[str, ...]:
        """The labels of the versions that answered; asked for once a version."""
        core, sets = self._core, []
        for version in versions:
            known = core.known_labels(version)
            if known is None:
                remaining = work.options.remaining()
                question = core.query("config", version=version, headers=work.options.headers)
                config = self._ask(question, None if remaining is None else max(remaining, 1e-3))
                known = core.keep_labels(version, config)
            sets.append(known)
        return core.one_set(sets)

    def _yes(self, kind: str, deadline: float) -> bool:
        try:
            return bool(self._reply(self._core.query(kind), seconds("deadline", deadline)).get(kind, False))
        except TransportError as error:
            return self._core.not_ready(error)

    def _ask(self, query: Query, deadline: float | None) -> dict[str, Any]:
        try:
            return self._reply(query, ASK_S if deadline is None else seconds("deadline", deadline))
        except TransportError as error:
            raise self._core.failed(error) from None

    def _reply(self, query: Query, limit: float) -> dict[str, Any]:
        """The reply to a question. Raises TransportError."""
        self._check_open()
        try:
            return self._transport.ask(query, limit)
        except ValueError:  # as in `_send`
            self._check_open()
            raise

    def _check_open(self) -> None:
        """Refuses to work on a closed client, which would be a bare ValueError of grpc."""
        if self._closed:
            raise RuntimeError("the client is closed; make a new one, or call inside its `with` block")
