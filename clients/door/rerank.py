"""Reranking, in two public forms.

* POST /v1/rerank, /v2/rerank: Cohere's and Jina's, as infinity, vLLM and their clients have it: `query`, `documents`
  (strings, or objects with `text`), `top_n`, `return_documents`; answer `results` with `index`, `relevance_score` and,
  if asked for, `document` as an object with `text`, best first; `usage` and `id` beside them.
  https://docs.cohere.com/reference/rerank, https://docs.vllm.ai "Re-rank API".
* POST /rerank: TEI's (RerankRequest, Rank of its router): `query`, `texts`, `return_text`, `truncate`; answer a list of
  `index`, `score` and, if asked for, `text`, best first. A body with `documents` is answered in the first form, which
  infinity and vLLM serve at this path.

Scores are as the model's activation gives them; `raw_scores` is refused when true.
"""

from __future__ import annotations

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
from clients.door.call import Call
from clients.result import RerankResult

TASK = "reranking"


async def rerank(call: Call, body: bytes) -> bytes:
    """Cohere's form. Raises as `embeddings`."""
    return await _cohere(call, read_json(body))


async def rerank_tei(call: Call, body: bytes) -> bytes:
    """TEI's form, or Cohere's where the body is. Raises as `embeddings`."""
    value = read_json(body)
    if "documents" in value and "texts" not in value:
        call.dialect = "openai"
        return await _cohere(call, value)
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


async def _cohere(call: Call, value: dict[str, Any]) -> bytes:
    form = parse(RerankBody, value)
    no_raw_scores(form.raw_scores)
    documents = plain_texts(form.documents, call.door.settings.max_inputs, "documents")
    result = await _ranked(call, form.model, form.query, documents, form.truncate)
    usage = call.spent(result.tokens, result.cut)
    kept = list(result)[: form.top_n or None]
    results = [
        {
            "index": one.index,
            "relevance_score": one.score,
            **({"document": {"text": one.document}} if form.return_documents else {}),
        }
        for one in kept
    ]
    return orjson.dumps(
        {"id": f"rerank-{call.id}", "object": "rerank", "model": call.model, "results": results, "usage": usage}
    )


async def _ranked(
    call: Call, name: str | None, query: str, documents: list[str], truncate: Truncation | None
) -> RerankResult:
    """All documents, so that all their tokens are counted; `top_n` is cut off afterwards."""
    model = await call.find(name, TASK)
    call.take(len(documents))
    return await model.client.rerank(query, documents, **call.options(truncate))
