"""Synchronous client of the entry model, over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

from clients.options import Aggregation, CallOptions, check_aggregation, whole
from clients.reading import answer_result, classify_result, cosines, encode_result, no_arrays, rerank_result, tag_result
from clients.result import AnswerResult, ClassifyResult, EncodeResult, Floats, RerankResult, TagResult
from clients.session import Session
from clients.texts import Texts, utf8


class EncoderClient(Session):
    """Sends texts to a server that serves the entry model.

    Any number of texts may be given: they travel in requests of at most `batch` texts, several at a time over kept
    connections, and come back in order. One client serves any number of threads; each call has its own bound on
    requests in flight, so that a long list in one thread does not hold up a single text in another. It belongs to the
    process that opened it: after a fork each process makes its own.

    Args:
        url: host:port of Triton's gRPC endpoint (8001 by default), or http://host:port of its HTTP endpoint (8000);
            grpcs:// and https:// are encrypted; of dns:///host:port every address of the name is called in turn.
        options: see ClientOptions: transport, model, batch, concurrency, retry, headers, token, restricted_key, tls.

    Raises:
        InvalidInput: an argument is outside its limits. Nothing is contacted before the first call.

    Example:
        >>> from clients import EncoderClient
        >>> with EncoderClient("127.0.0.1:8001") as client:
        ...     result = client.encode(["How far is the moon?", "384,400 km"], priority="interactive")
        >>> result.embeddings.shape, result.embeddings.dtype
        ((2, 384), dtype('float32'))
        >>> with EncoderClient("http://127.0.0.1:8000") as client:
        ...     client.encode("How far is the moon?").embeddings.shape
        (1, 384)
    """

    def encode(
        self, texts: Texts, *, prompt: str | None = None, dimensions: int | None = None, **options: Unpack[CallOptions]
    ) -> EncodeResult:
        """Encodes texts and returns when all are done.

        All texts are checked before the first is sent. The first request that fails for good ends the call: what is not
        sent is not sent any more, what is under way is cancelled, and the error's `texts` names the positions it is
        about.

        Args:
            texts: one text, a sequence of texts, or a numpy array of them (str or UTF-8 bytes); a single str counts as
                a list of one. The empty list is a valid batch of no texts (the server is asked for `dim` alone).
            prompt: name of a prompt of the model whose text is put before each text; "" for none, None for the model's
                default.
            dimensions: a shorter size of the embeddings that the model declares.
            options: see CallOptions: priority, timeout, deadline, truncate, overlap, headers, progress.

        Returns:
            Embeddings float32 [n, dim], tokens int32 [n] and cut int32 [n], in the order of the texts; the arrays are
            the caller's own and writable. [0, dim] for no texts.

        Raises:
            InvalidInput: an option is out of its limits, an item is not a str or cannot be UTF-8 (a lone surrogate),
                or the server refused a text or a key.
            QueueTimeout: a request waited longer in the queue than it may.
            Overloaded: the queue of the priority, or the long lane, is full.
            DeadlineExceeded: `deadline` passed.
            ServerUnavailable: no connection, or the model is not loaded.
            ServerFailure: the server failed, or answered something else than the contract.
            RuntimeError: the client is closed.

        Example:
            >>> from clients import EncoderClient, Overloaded, QueueTimeout
            >>> with EncoderClient("127.0.0.1:8001") as client:
            ...     try:
            ...         result = client.encode(["short", "long " * 200], priority=1, timeout=0.5, deadline=20)
            ...     except (QueueTimeout, Overloaded) as error:
            ...         print("later:", error)
            >>> [encoding.embedding.shape for encoding in result]
            [(384,), (384,)]
        """
        self._check_open()
        work = self._core.encoding_work(texts, prompt, dimensions, options)
        if not work.texts:
            return encode_result(no_arrays(dimensions or self._dim(options.get("deadline"), work.options.headers)), 0)
        return encode_result(self._all(work), work.exchange.retries)

    def encode_batches(
        self, texts: Texts, *, prompt: str | None = None, dimensions: int | None = None, **options: Unpack[CallOptions]
    ) -> Iterator[EncodeResult]:
        """Like `encode`, but yields the result of each request, in order, as soon as it and those before it are there.

        Arguments are checked at the call; errors of requests come from the iterator. Leaving the loop early cancels
        what is under way. `deadline` runs from the call on and includes the time the caller spends between results.

        Yields:
            Results of 1 to `batch` texts; together they are the texts in order. Nothing for the empty list. `retries`
            counts those of the call so far.

        Raises:
            EncoderError: as `encode`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001") as client:
            ...     for result in client.encode_batches([f"text {i}" for i in range(100)]):
            ...         print(len(result))
            32
            32
            32
            4
        """
        self._check_open()
        work = self._core.encoding_work(texts, prompt, dimensions, options)
        return (encode_result(arrays, work.exchange.retries) for arrays in self._run(work))

    def classify(
        self, texts: Texts, *, pairs: Texts | None = None, top_k: int | None = None, **options: Unpack[CallOptions]
    ) -> ClassifyResult:
        """Classifies texts, or pairs of texts, with a model whose task is classification.

        Args:
            texts: as `encode`.
            pairs: the second text of each pair; a single str goes with every text, and the other way round.
            top_k: how many labels iterating the result gives for each text; None all.
            options: as `encode`.

        Returns:
            Scores float32 [n, labels] with the model's labels.

        Raises:
            EncoderError: as `encode`; InvalidInput also when texts and pairs are not as many.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001", model="encode_topics") as client:
            ...     result = client.classify(["How far is the moon?"], top_k=1)
            >>> [[one.label for one in labels] for labels in result]
            [['number']]
        """
        self._check_open()
        work = self._core.classify_work(texts, pairs, top_k, options)
        if not work.texts:
            labels = self._labels([""], work)
            return classify_result(no_arrays(len(labels)), labels, top_k, 0, self.url)
        arrays = self._all(work)
        labels = self._labels(sorted(arrays.versions), work)
        return classify_result(arrays, labels, top_k, work.exchange.retries, self.url)

    def rerank(
        self, query: str, documents: Texts, *, top_n: int | None = None, **options: Unpack[CallOptions]
    ) -> RerankResult:
        """Sorts documents by their score for a query, with a model whose task is reranking.

        Args:
            query: one text.
            documents: as `texts` of `encode`.
            top_n: how many of the best come back; None all. All are scored.
            options: as `encode`; `texts` of errors are positions of documents.

        Returns:
            The documents, the best first, with their positions and scores; empty for no documents.

        Raises:
            EncoderError: as `encode`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001", model="encode_rerank") as client:
            ...     ranked = client.rerank("How far is the moon?", ["Paris", "The moon is 384,400 km away"], top_n=1)
            >>> [(one.index, one.document) for one in ranked]
            [(1, 'The moon is 384,400 km away')]
        """
        self._check_open()
        if top_n is not None:
            whole("top_n", top_n, 1_000_000_000)
        work = self._core.rerank_work(query, documents, options)
        scored = work.pairs or []
        arrays = self._all(work) if scored else no_arrays(1)
        return rerank_result(arrays, scored, top_n, work.exchange.retries, self.url)

    def tag(self, texts: Texts, *, aggregation: Aggregation | None = None, **options: Unpack[CallOptions]) -> TagResult:
        """Finds entities in texts, with a model whose task is tagging.

        Args:
            texts: as `encode`.
            aggregation: how tokens become entities: "none" gives every token, "simple" joins neighbours of one label,
                "first", "average" and "max" also decide by whole words; None is the model's own.
            options: as `encode`.

        Returns:
            For each text its entities with label, score, word and character positions.

        Raises:
            EncoderError: as `encode`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001", model="encode_names") as client:
            ...     result = client.tag(["Ada lives in Paris"])
            >>> [(one.label, one.word, one.start, one.end) for one in result.entities[0]]
            [('PER', 'Ada', 0, 3), ('LOC', 'Paris', 13, 18)]
        """
        self._check_open()
        work = self._core.work("tagging", texts, options, {"aggregation": check_aggregation(aggregation)})
        arrays = self._all(work) if work.texts else no_arrays(1, object)
        return tag_result(arrays, work.exchange.retries, self.url)

    def answer(self, questions: Texts, contexts: Texts, **options: Unpack[CallOptions]) -> AnswerResult:
        """Finds the answers to questions in contexts, with a model whose task is answering.

        Args:
            questions: as `texts` of `encode`.
            contexts: one for each question; a single str on one side goes with all of the other.
            options: as `encode`.

        Returns:
            One answer per question, with its score and character positions in the context.

        Raises:
            EncoderError: as `encode`; InvalidInput also when there are not as many of each.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001", model="encode_answers") as client:
            ...     result = client.answer("Where does Ada live?", "Ada lives in Paris")
            >>> result.answers[0].text
            'Paris'
        """
        self._check_open()
        work = self._core.pair_work("answering", questions, contexts, ("questions", "contexts"), options)
        arrays = self._all(work) if work.texts else no_arrays(1, object)
        return answer_result(arrays, work.exchange.retries, self.url)

    def similarity(
        self,
        texts: Texts,
        others: Texts | None = None,
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Floats:
        """Cosine of the embeddings of texts with those of others.

        Args:
            texts: as `encode`.
            others: as `encode`; None compares the texts with one another.
            prompt: as `encode`, for both.
            dimensions: as `encode`.
            options: as `encode`; a `deadline` covers both, `texts` of errors counts the others after the texts.

        Returns:
            float32 [n, m].

        Raises:
            EncoderError: as `encode`.

        Example:
            >>> from clients import EncoderClient
            >>> with EncoderClient("127.0.0.1:8001") as client:
            ...     client.similarity("the moon", ["the moon", "Paris"]).shape
            (1, 2)
        """
        first = [one.decode() for one in utf8(texts)]
        second = [] if others is None else [one.decode() for one in utf8(others, "others", len(first))]
        result = self.encode(first + second, prompt=prompt, dimensions=dimensions, **options)
        return cosines(result, len(first), others is not None)
