"""The same client under asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Unpack

from clients.async_session import AsyncSession
from clients.core import Work
from clients.options import Aggregation, CallOptions, check_aggregation, whole
from clients.reading import answer_result, classify_result, cosines, encode_result, no_arrays, rerank_result, tag_result
from clients.result import AnswerResult, ClassifyResult, EncodeResult, Floats, RerankResult, TagResult
from clients.texts import Texts, utf8


class AsyncEncoderClient(AsyncSession):
    """EncoderClient for asyncio: the same methods, arguments, results and errors, to be awaited.

    It belongs to the event loop of its first call. Many tasks may share it; cancelling a task cancels its requests.

    Args:
        url: as EncoderClient.
        options: as EncoderClient.

    Raises:
        InvalidInput: an argument is outside its limits. Nothing is contacted before the first call.

    Example:
        >>> import asyncio
        >>> from clients import AsyncEncoderClient
        >>> async def main():
        ...     async with AsyncEncoderClient("127.0.0.1:8001") as client:
        ...         one, other = await asyncio.gather(client.encode("the moon"), client.encode(["Paris", "Rome"]))
        ...         return one.embeddings.shape, other.embeddings.shape
        >>> asyncio.run(main())
        ((1, 384), (2, 384))
    """

    async def encode(
        self, texts: Texts, *, prompt: str | None = None, dimensions: int | None = None, **options: Unpack[CallOptions]
    ) -> EncodeResult:
        """See EncoderClient.encode."""
        self._check_open()
        work = self._core.encoding_work(texts, prompt, dimensions, options)
        if not work.texts:
            width = dimensions or await self._dim(options.get("deadline"), work.options.headers)
            return encode_result(no_arrays(width), 0)
        return encode_result(await self._all(work), work.exchange.retries)

    def encode_batches(
        self, texts: Texts, *, prompt: str | None = None, dimensions: int | None = None, **options: Unpack[CallOptions]
    ) -> AsyncIterator[EncodeResult]:
        """See EncoderClient.encode_batches; for `async for`.

        A loop that is left early cancels what is under way when the iterator is closed: put contextlib.aclosing around
        it, or leave it to the event loop.

        Example:
            >>> import asyncio
            >>> from clients import AsyncEncoderClient
            >>> async def main():
            ...     async with AsyncEncoderClient("http://127.0.0.1:8000") as client:
            ...         return [len(result) async for result in client.encode_batches(["a text"] * 40)]
            >>> asyncio.run(main())
            [32, 8]
        """
        self._check_open()
        return self._results(self._core.encoding_work(texts, prompt, dimensions, options))

    async def _results(self, work: Work) -> AsyncIterator[EncodeResult]:
        # Closed along with this one: left to the event loop, it would cancel its requests some time later.
        async with aclosing(self._run(work)) as parts:
            async for arrays in parts:
                yield encode_result(arrays, work.exchange.retries)

    async def classify(
        self, texts: Texts, *, pairs: Texts | None = None, top_k: int | None = None, **options: Unpack[CallOptions]
    ) -> ClassifyResult:
        """See EncoderClient.classify."""
        self._check_open()
        work = self._core.classify_work(texts, pairs, top_k, options)
        if not work.texts:
            labels = await self._labels([""], work)
            return classify_result(no_arrays(len(labels)), labels, top_k, 0, self.url)
        arrays = await self._all(work)
        labels = await self._labels(sorted(arrays.versions), work)
        return classify_result(arrays, labels, top_k, work.exchange.retries, self.url)

    async def rerank(
        self, query: str, documents: Texts, *, top_n: int | None = None, **options: Unpack[CallOptions]
    ) -> RerankResult:
        """See EncoderClient.rerank."""
        self._check_open()
        if top_n is not None:
            whole("top_n", top_n, 1_000_000_000)
        work = self._core.rerank_work(query, documents, options)
        scored = work.pairs or []
        arrays = await self._all(work) if scored else no_arrays(1)
        return rerank_result(arrays, scored, top_n, work.exchange.retries, self.url)

    async def tag(
        self, texts: Texts, *, aggregation: Aggregation | None = None, **options: Unpack[CallOptions]
    ) -> TagResult:
        """See EncoderClient.tag."""
        self._check_open()
        work = self._core.work("tagging", texts, options, {"aggregation": check_aggregation(aggregation)})
        arrays = await self._all(work) if work.texts else no_arrays(1, object)
        return tag_result(arrays, work.exchange.retries, self.url)

    async def answer(self, questions: Texts, contexts: Texts, **options: Unpack[CallOptions]) -> AnswerResult:
        """See EncoderClient.answer."""
        self._check_open()
        work = self._core.pair_work("answering", questions, contexts, ("questions", "contexts"), options)
        arrays = await self._all(work) if work.texts else no_arrays(1, object)
        return answer_result(arrays, work.exchange.retries, self.url)

    async def similarity(
        self,
        texts: Texts,
        others: Texts | None = None,
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[CallOptions],
    ) -> Floats:
        """See EncoderClient.similarity."""
        first = [one.decode() for one in utf8(texts)]
        second = [] if others is None else [one.decode() for one in utf8(others, "others", len(first))]
        result = await self.encode(first + second, prompt=prompt, dimensions=dimensions, **options)
        return cosines(result, len(first), others is not None)
