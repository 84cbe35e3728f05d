"""Reranking, in three public forms.

* A body with `query` and `documents` (strings, or objects with `text`), `top_n`, `return_documents`: answer `results`
  with `index`, `relevance_score` and, if asked for, `document`, best first; `usage`, `id` and `created` beside them.
  POST /v1/rerank and /rerank give `document` as a text, as infinity and its client have it (RerankInput, ReRankResult:
  https://github.com/michaelfeil/infinity); POST /v2/rerank as an object with `text`, as Cohere, Jina and vLLM have it
  (https://docs.cohere.com/reference/rerank, https://docs.vllm.ai "Re-rank API").
* A body with `query` and `texts`, `return_text`, `truncate`, at any of these paths: TEI's (RerankRequest, Rank of its
  router); answer a list of `index`, `score` and, if asked for, `text`, best first.

Scores are as the model's activation gives them; `raw_scores` is refused when true.
"""

from __future__ import annotations

import time
from typing import Any

import orjson

from clients.door.bodies import (
    RerankBody,
    TeiRerankBody,
    Truncation,
    no_raw_scores,
    parse,
    plain_texts,
    read_json,
)
from clients.door.call import Call, check_finite
from clients.result import RerankResult

TASK = "reranking"


async def rerank(call: Call, body: bytes) -> bytes:
    """infinity's form, or TEI's, as the body is. Raises as `embeddings`."""
    return await _rerank(call, body, objects=False)


async def rerank_objects(call: Call, body: bytes) -> bytes:
    """Cohere's, Jina's and vLLM's form, or TEI's, as the body is. Raises as `embeddings`."""
    return await _rerank(call, body, objects=True)


async def _rerank(call: Call, body: bytes, *, objects: bool) -> bytes:
    value = read_json(body)
    if "texts" in value and "documents" not in value:
        call.dialect = "tei"
        return await _tei(call, value)
    if "documents" in value:
        call.dialect = "openai"
    form = parse(RerankBody, value)
    no_raw_scores(form.raw_scores)
    documents = plain_texts(form.documents, call.door.settings.max_inputs, "documents")
    result = await _ranked(call, form.model, form.query, documents, form.truncate)
    usage = call.spent(result.tokens, result.cut)
    results = []
    for one in list(result)[: form.top_n or None]:
        shown = {"text": one.document} if objects else one.document
        results.append(
            {
                "index": one.index,
                "relevance_score": one.score,
                **({"document": shown} if form.return_documents else {}),
            }
        )
    return orjson.dumps(
        {
            "id": f"rerank-{call.id}",
            "object": "rerank",
            "created": int(time.time()),
            "model": call.model,
            "results": results,
            "usage": usage,
        }
    )


async def _tei(call: Call, value: dict[str, Any]) -> bytes:
    form = parse(TeiRerankBody, value)
    no_raw_scores(form.raw_scores)
    texts = plain_texts(form.texts, call.door.settings.max_inputs, "texts")
    result = await _ranked(call, form.model, form.query, texts, form.way)
    call.spent(result.tokens, result.cut)
    ranks = [
        {"index": one.index, "score": one.score, **({"text": one.document} if form.return_text else {})}
        for one in result
    ]
    return orjson.dumps(ranks)


async def _ranked(
    call: Call, name: str | None, query: str, documents: list[str], truncate: Truncation | None
) -> RerankResult:
    """All documents, so that all their tokens are counted; `top_n` is cut off afterwards."""
    model = await call.find(name, TASK)
    call.take(len(documents))
    result = await model.client.rerank(query, documents, **call.options(truncate))
    check_finite(result.scores)
    return result
