"""Synchronous client of the entry model `encode`, over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from tritonclient.grpc import MAX_GRPC_MESSAGE_SIZE, InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

from clients.errors import DeadlineExceeded, InvalidInput, ServerFailure, ServerUnavailable, from_grpc
from clients.options import Options, Priority, Truncate, check_options, seconds, utf8, whole
from clients.result import EncodeResult, empty, joined, read_answer

_CHANNEL = [
    ("grpc.max_send_message_length", MAX_GRPC_MESSAGE_SIZE),
    ("grpc.max_receive_message_length", MAX_GRPC_MESSAGE_SIZE),
    # Without these a channel that once failed to connect fails every call for up to two minutes, server up or not.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A client's connection is its own: closing it frees it, and no other client's back-off holds it up.
    ("grpc.use_local_subchannel_pool", 1),
]


class _Call(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Ends it; its answer is an error with status CANCELLED."""


_Answers = SimpleQueue[tuple[int, InferResult | None, InferenceServerException | None]]


class EncoderClient:
    """Encodes texts on a server that serves the entry model.

    Any number of texts may be given: they travel in requests of at most `batch` texts, several at a time over one
    HTTP/2 connection, and come back in order. One client serves any number of threads; each call has its own bound on
    requests in flight, so that a long list in one thread does not hold up a single text in another.

    Args:
        url: host:port of Triton's gRPC endpoint.
        model: name of the entry model.
        batch: most texts of one request, 1 to 1024; the server refuses more than its own `entry.batch` (32 by default).
        concurrency: most requests that one call keeps in flight, 1 to 256.

    Raises:
        InvalidInput: an argument is outside its limits. Nothing is contacted before the first call.

    Example:
        >>> from clients import EncoderClient
        >>> with EncoderClient("127.0.0.1:8001") as client:
        ...     result = client.encode(["How far is the moon?", "384,400 km"], priority="interactive")
        >>> result.embeddings.shape, result.embeddings.dtype, result.tokens.tolist()
        ((2, 384), dtype('float32'), [8, 8])
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", *, model: str = "encode", batch: int = 32, concurrency: int = 8
    ) -> None:
        """Prepares the channel; see the class."""
        if not url or url.startswith(("http://", "https://", "grpc://")):
            raise InvalidInput("url is not a gRPC address", value=url, limit="host:port, for example 127.0.0.1:8001")
        if not model:
            raise InvalidInput("model is empty", remedy="give the entry model's name, 'encode' by default")
        self._url, self._model = url, model
        self._batch = whole("batch", batch, 1024)
        self._concurrency = whole("concurrency", concurrency, 256)
        self._closed = False
        self._client = InferenceServerClient(url, channel_args=_CHANNEL)

    @property
    def url(self) -> str:
        """Address of the server, host:port."""
        return self._url

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
        self._client.close()

    def ready(self, *, deadline: float = 2.0) -> bool:
        """Says whether the server answers and has the entry model loaded.

        The lanes behind the entry are not asked; they are loaded before it.

        Args:
            deadline: how long to wait for the answer, seconds.

        Raises:
            ServerFailure: something answers that is not a Triton server, or that failed.
        """
        self._check_open()
        try:
            return bool(self._client.is_model_ready(self._model, client_timeout=seconds("deadline", deadline)))
        except InferenceServerException as error:
            typed = from_grpc(error, self._url)
            if isinstance(typed, ServerUnavailable | DeadlineExceeded):
                return False
            raise typed from None

    def dim(self, *, deadline: float | None = None) -> int:
        """Asks the server for the length of an embedding; computes nothing.

        Args:
            deadline: how long to wait for the answer, seconds.

        Raises:
            ServerUnavailable: the server cannot be reached or has not loaded the model.
            DeadlineExceeded: no answer within `deadline`.
            ServerFailure: the model has no output EMBEDDING of a fixed length.
        """
        self._check_open()
        limit = None if deadline is None else seconds("deadline", deadline)
        try:
            metadata = self._client.get_model_metadata(self._model, client_timeout=limit)
        except InferenceServerException as error:
            raise from_grpc(error, self._url) from None
        shape = next((list(output.shape) for output in metadata.outputs if output.name == "EMBEDDING"), None)
        if shape is None or shape[-1] < 1:
            raise ServerFailure(
                f"model {self._model!r} states no length of its embeddings",
                value=shape,
                limit="an output EMBEDDING [n, dim] with a fixed dim",
                remedy="name the entry model of an embedding repository",
                url=self._url,
            )
        return int(shape[-1])

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        truncate: Truncate = "end",
    ) -> EncodeResult:
        """Encodes texts and returns when all are done.

        All texts are checked before the first is sent. The first request that fails ends the call: what is not sent is
        not sent any more, what is under way is cancelled, and the error's `texts` names the positions it is about.

        Args:
            texts: one text or a sequence of texts; a single str counts as a list of one. The empty list is a valid
                batch of no texts (the server is asked for `dim` alone).
            priority: "interactive" (1) is served before "background" (2); None is background.
            timeout: longest wait in the server's queue, seconds, at least 1e-6; it can only shorten the server's own
                limit for the priority. It holds for each request of the call, and ends when computing starts.
            deadline: longest time for the whole call, seconds, waiting and computing and transfer together; None waits
                without end.
            truncate: what happens to a text that is too long: "end" cuts its end off (`cut` says how much), "error"
                refuses it.

        Returns:
            Embeddings float32 [n, dim], tokens int32 [n] and cut int32 [n], in the order of the texts; the arrays are
            the caller's own and writable. [0, dim] for no texts.

        Raises:
            InvalidInput: an option is out of its limits, an item is not a str or cannot be UTF-8 (a lone surrogate),
                or the server refused a text.
            QueueTimeout: a request waited longer in the queue than it may.
            Overloaded: the queue of the priority, or the long lane, is full.
            DeadlineExceeded: `deadline` passed.
            ServerUnavailable: no connection, or the model is not loaded.
            ServerFailure: the server failed, or answered something else than the contract.
            RuntimeError: the client is closed.

        Example:
            >>> from clients import EncoderClient, Overloaded, QueueTimeout
            >>> with EncoderClient() as client:
            ...     try:
            ...         result = client.encode(["short", "long " * 5000], priority=1, timeout=0.1, deadline=2)
            ...     except (QueueTimeout, Overloaded) as error:
            ...         print("later:", error)
            >>> [(encoding.tokens, encoding.cut) for encoding in result]
            [(3, 0), (2048, 2954)]
        """
        self._check_open()
        options = check_options(priority, timeout, deadline, truncate)
        encoded = utf8(texts)
        if not encoded:
            return empty(self.dim(deadline=deadline))
        return joined(list(self._run(encoded, options)), self._url)

    def encode_batches(
        self,
        texts: str | Sequence[str],
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        deadline: float | None = None,
        truncate: Truncate = "end",
    ) -> Iterator[EncodeResult]:
        """Like `encode`, but yields the result of each request, in order, as soon as it and those before it are there.

        Arguments are checked at the call; errors of requests come from the iterator. Leaving the loop early cancels
        what is under way. `deadline` runs from the call on and includes the time the caller spends between results.

        Yields:
            Results of 1 to `batch` texts; together they are the texts in order. Nothing for the empty list.

        Raises:
            EncoderError: as `encode`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient() as client:
            ...     for result in client.encode_batches([f"text {i}" for i in range(100)]):
            ...         print(len(result))
            32
            32
            32
            4
        """
        self._check_open()
        options = check_options(priority, timeout, deadline, truncate)
        return self._run(utf8(texts), options)

    def _run(self, texts: list[bytes], options: Options) -> Iterator[EncodeResult]:
        """Sends the requests, at most `concurrency` at a time, and yields their results in order."""
        parts = [range(i, min(i + self._batch, len(texts))) for i in range(0, len(texts), self._batch)]
        # gRPC's own thread only puts answers here; everything else happens in the caller's thread.
        answers: _Answers = SimpleQueue()
        calls: dict[int, _Call] = {}
        results: dict[int, EncodeResult] = {}
        sent = given = 0
        try:
            while given < len(parts):
                while sent < len(parts) and len(calls) < self._concurrency:
                    calls[sent] = self._send(sent, texts, parts[sent], options, answers)
                    sent += 1
                number, result, error = answers.get()
                del calls[number]
                if error is not None:
                    raise from_grpc(error, self._url, parts[number])
                results[number] = read_answer(result, parts[number], self._url)
                while given in results:
                    yield results.pop(given)
                    given += 1
        finally:
            for call in calls.values():
                call.cancel()

    def _send(self, number: int, texts: list[bytes], part: range, options: Options, answers: _Answers) -> _Call:
        """Sends one request; its answer arrives in `answers` under its number."""
        self._check_open()
        remaining = options.remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded(
                "the call's deadline passed before these were sent",
                remedy="give a longer deadline= or fewer texts",
                url=self._url,
                texts=part,
            )
        # dtype object: numpy's own 'S' would drop the zero bytes at a text's end.
        data = np.array(texts[part.start : part.stop], dtype=np.object_).reshape(-1, 1)
        tensor = InferInput("TEXT", list(data.shape), "BYTES").set_data_from_numpy(data)
        call: _Call = self._client.async_infer(
            self._model,
            [tensor],
            callback=lambda result, error: answers.put((number, result, error)),
            priority=options.priority,
            timeout=options.timeout_us,
            client_timeout=remaining,
            parameters={"truncate": options.truncate},
        )
        return call

    def _check_open(self) -> None:
        """Refuses to work on a closed channel, which would be a bare ValueError of grpc."""
        if self._closed:
            raise RuntimeError("the EncoderClient is closed; make a new one, or call inside its `with` block")
