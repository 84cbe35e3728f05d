"""What both clients share: everything but waiting. Checks, requests, questions, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from clients.connection import Headers, Protocol, Tls, key_headers, parse_address
from clients.errors import DeadlineExceeded, EncoderError, InvalidInput, ServerFailure, ServerUnavailable
from clients.exchange import Exchange
from clients.failures import TransportError, from_status
from clients.model import ModelFacts, read_facts
from clients.options import CallOptions, Options, check_dimensions, check_options, check_prompt, whole
from clients.retry import RetryBudget, RetryPolicy
from clients.status import ServerStatus, read_status
from clients.texts import paired, utf8
from clients.wire import InferRequest, Query, bytes_tensor

#: Longest wait for a question that computes nothing, where the caller gives no deadline, seconds.
ASK_S = 30.0


class ClientOptions(TypedDict, total=False):
    """Arguments that both clients take beside `url`, all by keyword and all optional."""

    transport: Protocol | None
    """"grpc" or "http" for a url without a scheme; None is gRPC."""
    model: str
    """Name of the entry model; "encode" by default."""
    batch: int
    """Most texts of one request, 1 to 1024; the server refuses more than its own `entry.batch` (32 by default)."""
    concurrency: int
    """Most requests that one call keeps in flight, 1 to 256; 8 by default."""
    retry: RetryPolicy | None
    """Retries of requests that were surely not computed; None for none at all."""
    headers: Mapping[str, str] | None
    """Headers of every request."""
    token: str | None
    """Sent as `authorization: Bearer TOKEN`."""
    restricted_key: tuple[str, str] | None
    """Name and value of a key of Triton's --grpc-restricted-protocol or --http-restricted-api."""
    tls: Tls | None
    """Encrypts; by itself a url of grpcs:// or https:// trusts what the system trusts."""


@dataclass(frozen=True, slots=True)
class Work:
    """A call that is ready to be driven."""

    task: str
    texts: list[bytes]
    pairs: list[bytes] | None
    options: Options
    exchange: Exchange


class Core:
    """The settings of a client, checked, and what it makes of a call before and after the wire.

    Raises:
        InvalidInput: an argument is outside its limits.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: Protocol | None = None,
        model: str = "encode",
        batch: int = 32,
        concurrency: int = 8,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008 - frozen
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        restricted_key: tuple[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Nothing is contacted; see ClientOptions."""
        if not model:
            raise InvalidInput("model is empty", remedy="give the entry model's name, 'encode' by default")
        self.address = parse_address(url, transport, tls)
        if self.address.tls:
            self.address.tls.context()  # a wrong file is the caller's error now, not the first request's
        self.url, self.model = url, model
        self.batch = whole("batch", batch, 1024)
        self.concurrency = whole("concurrency", concurrency, 256)
        self.headers: Headers = key_headers(self.address.protocol, headers, token, restricted_key)
        self._policy = RetryPolicy(limit=0) if retry is None else retry
        self._budget = RetryBudget(self._policy.budget)
        self._labels: dict[str, tuple[str, ...]] = {}

    # Before the wire

    def work(
        self,
        task: str,
        texts: object,
        options: CallOptions,
        parameters: Mapping[str, str | int | None] | None = None,
        name: str = "texts",
    ) -> Work:
        """A call over single texts.

        Raises:
            InvalidInput: an option or a text is wrong; nothing was sent.
        """
        checked = check_options(**options, task=parameters)
        return self._work(task, utf8(texts, name), None, checked)

    def pair_work(self, task: str, first: Any, second: Any, names: tuple[str, str], options: CallOptions) -> Work:
        """A call over pairs of texts.

        Raises:
            InvalidInput: an option or a text is wrong, or there are not as many of each; nothing was sent.
        """
        checked = check_options(**options)
        one, other = paired(first, second, names)
        return self._work(task, one, other, checked)

    def rerank_work(self, query: object, documents: object, options: CallOptions) -> Work:
        """A call over a query and its documents.

        Raises:
            InvalidInput: an option or a text is wrong; nothing was sent.
        """
        checked = check_options(**options)
        if not isinstance(query, str):
            raise InvalidInput(f"the query is not a str but {type(query).__name__}", value=query)
        scored = utf8(documents, "documents")
        return self._work("reranking", utf8(query, "query") * len(scored), scored, checked)

    def encoding_work(self, texts: object, prompt: object, dimensions: object, options: CallOptions) -> Work:
        """A call for embeddings.

        Raises:
            InvalidInput: an option or a text is wrong; nothing was sent.
        """
        parameters = {"prompt": check_prompt(prompt), "dimensions": check_dimensions(dimensions)}
        return self.work("embedding", texts, options, parameters)

    def classify_work(self, texts: Any, pairs: Any, top_k: object, options: CallOptions) -> Work:
        """A call for the scores of texts or pairs.

        Raises:
            InvalidInput: an option or a text is wrong; nothing was sent.
        """
        if top_k is not None:
            whole("top_k", top_k, 1_000_000)
        if pairs is None:
            return self.work("classification", texts, options)
        return self.pair_work("classification", texts, pairs, ("texts", "pairs"), options)

    def _work(self, task: str, texts: list[bytes], pairs: list[bytes] | None, options: Options) -> Work:
        def build(part: range) -> InferRequest:
            inputs = [bytes_tensor("TEXT", texts[part.start : part.stop])]
            if pairs is not None:
                inputs.append(bytes_tensor("TEXT_PAIR", pairs[part.start : part.stop]))
            return InferRequest(self.model, tuple(inputs), options.parameters, options.headers)

        exchange = Exchange(
            [range(at, min(at + self.batch, len(texts))) for at in range(0, len(texts), self.batch)],
            build,
            concurrency=self.concurrency,
            ends=options.ends,
            policy=self._policy,
            budget=self._budget,
            url=self.url,
        )
        return Work(task, texts, pairs, options, exchange)

    # After the wire

    def failed(self, error: TransportError) -> EncoderError:
        """The typed error of a question that failed."""
        return from_status(error.status, error.message, self.url)

    def not_ready(self, error: TransportError) -> bool:
        """False, if the failure says that nothing is ready there.

        Raises:
            EncoderError: it says something else.
        """
        typed = self.failed(error)
        if isinstance(typed, ServerUnavailable | DeadlineExceeded):
            return False
        raise typed

    def dim(self, metadata: Mapping[str, Any]) -> int | None:
        """The length of an embedding, out of the model's metadata; None where requests choose among several.

        Raises:
            ServerFailure: the model has no embeddings.
        """
        outputs = metadata.get("outputs", ())
        shape = next((output.get("shape", [-1]) for output in outputs if output.get("name") == "EMBEDDING"), None)
        if not shape:
            raise self._no_length(shape)
        return int(shape[-1]) if int(shape[-1]) > 0 else None

    def widest(self, config: Mapping[str, Any]) -> int:
        """The longest of the lengths that a request may choose, out of the model's configuration.

        Raises:
            ServerFailure: it names none.
        """
        size = self.facts(config).size
        if size is None:
            raise self._no_length([-1])
        return size

    def _no_length(self, shape: object) -> ServerFailure:
        return ServerFailure(
            f"model {self.model!r} states no length of its embeddings",
            value=shape,
            limit="an output EMBEDDING [n, dim] with a fixed dim, or a parameter `dimensions`",
            remedy="name the entry model of an embedding repository",
            url=self.url,
        )

    def facts(self, config: Mapping[str, Any]) -> ModelFacts:
        """What the model says of itself, out of its configuration."""
        return read_facts(config, self.url)

    def known_labels(self, version: str) -> tuple[str, ...] | None:
        """The labels of a version of the model if they have been asked for; a version never changes."""
        return self._labels.get(version)

    def keep_labels(self, version: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Reads and keeps the labels of a version; those of "", whichever version is served, are not kept.

        Raises:
            ServerFailure: it names none.
        """
        labels = self.facts(config).labels
        if not labels:
            raise ServerFailure(
                f"model {self.model!r} names no labels",
                limit="a parameter `labels` in its configuration: a JSON list",
                remedy="name the entry model of a classification repository",
                url=self.url,
            )
        if version:
            self._labels[version] = labels
        return labels

    def one_set(self, sets: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """The labels that all versions which answered share.

        Raises:
            ServerFailure: they differ.
        """
        if len(set(sets)) > 1:
            raise ServerFailure(
                "the requests of the call were answered by models of different labels",
                value=sorted(set(sets)),
                remedy="call again; the served model changed meanwhile",
                url=self.url,
            )
        return sets[0]

    def status(
        self, replies: Mapping[str, Mapping[str, Any]], index: Mapping[str, Any] | None, metrics: str | None
    ) -> ServerStatus:
        """The status out of the server's replies."""
        return read_status(self.url, replies["server"], replies["statistics"], index, metrics)

    def query(self, kind: Any, *, version: str = "", model: str | None = None, headers: Headers = ()) -> Query:
        """A question about the client's own model; `headers` are those of the call that asks it."""
        return Query(kind, self.model if model is None else model, version, headers)
