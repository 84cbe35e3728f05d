"""Classification, in three public forms.

* POST /v1/classify: infinity's (ClassifyInput, ClassifyResult): `input` is a list of strings (or one); answer `data`
  with, for each text, a list of `label` and `score`, best first. https://github.com/michaelfeil/infinity
* POST /classify: vLLM's (ClassificationRequest, ClassificationResponse): `input` is a string or a list of them; answer
  `data` with `index`, `label`, `probs` in the order of the model's labels, `num_classes`. https://docs.vllm.ai
* POST /predict, and a body with `inputs` at the other two: TEI's (PredictRequest, PredictResponse of its router):
  `inputs` is a string, a pair ["a", "b"], or a batch of [text] and [text, pair]; answer a list of `label` and `score`,
  best first; of a batch, a list of such lists.

Between the first two the path decides, as their bodies are the same. Scores are as the model's activation gives them;
`raw_scores` is refused when true.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson

from clients.door.bodies import (
    ClassifyBody,
    TeiPredictBody,
    Truncation,
    no_raw_scores,
    parse,
    plain_texts,
    read_json,
    within,
)
from clients.door.call import Call, check_finite
from clients.door.problems import invalid
from clients.result import ClassifyResult

TASK = "classification"


async def classify(call: Call, body: bytes) -> bytes:
    """infinity's form, or TEI's, as the body is. Raises as `embeddings`."""
    value = read_json(body)
    if _is_tei(value):
        return await _tei(call, value)
    result, usage = await _of_body(call, value)
    return _listed(call, "classify", [_scores(result, row) for row in range(len(result))], usage)


async def classify_vllm(call: Call, body: bytes) -> bytes:
    """vLLM's form, or TEI's, as the body is. Raises as `embeddings`."""
    value = read_json(body)
    if _is_tei(value):
        return await _tei(call, value)
    result, usage = await _of_body(call, value)
    data = [
        {
            "index": index,
            "label": result.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(result.labels),
        }
        for index, row in enumerate(result.scores)
    ]
    return _listed(call, "list", data, usage)


async def predict_tei(call: Call, body: bytes) -> bytes:
    """TEI's form. Raises as `embeddings`."""
    return await _tei(call, read_json(body))


def _is_tei(value: dict[str, Any]) -> bool:
    return "inputs" in value and "input" not in value


async def _tei(call: Call, value: dict[str, Any]) -> bytes:
    call.dialect = "tei"
    form = parse(TeiPredictBody, value)
    no_raw_scores(form.raw_scores)
    items, batch = _tei_inputs(form.inputs, call.door.settings.max_inputs)
    model = await call.find(form.model, TASK)
    call.take(len(items))
    options = call.options(form.way)
    answers: list[list[dict[str, Any]]] = [[] for _ in items]
    tokens, cut = [], []
    # Single texts and pairs are different inputs of the entry, so a batch that mixes them is two calls.
    for length in (1, 2):
        chosen = [at for at, item in enumerate(items) if len(item) == length]
        if not chosen:
            continue
        pairs = [items[at][1] for at in chosen] if length == 2 else None
        result = await model.client.classify([items[at][0] for at in chosen], pairs=pairs, **options)
        check_finite(result.scores)
        tokens.append(result.tokens)
        cut.append(result.cut)
        for row, at in enumerate(chosen):
            answers[at] = _scores(result, row)
    call.spent(np.concatenate(tokens), np.concatenate(cut))
    return orjson.dumps(answers if batch else answers[0])


async def _of_body(call: Call, value: dict[str, Any]) -> tuple[ClassifyResult, dict[str, int]]:
    form = parse(ClassifyBody, value)
    no_raw_scores(form.raw_scores)
    texts = plain_texts(form.input, call.door.settings.max_inputs, "input")
    result = await _classified(call, form.model, texts, form.truncate)
    return result, call.spent(result.tokens, result.cut)


async def _classified(call: Call, name: str | None, texts: list[str], truncate: Truncation | None) -> ClassifyResult:
    model = await call.find(name, TASK)
    call.take(len(texts))
    result = await model.client.classify(texts, **call.options(truncate))
    check_finite(result.scores)
    return result


def _scores(result: ClassifyResult, row: int) -> list[dict[str, Any]]:
    """Labels and scores of a text, best first; equal scores stay in the model's order."""
    scores = result.scores[row]
    order = np.argsort(-scores, kind="stable")
    return [{"label": result.labels[column], "score": float(scores[column])} for column in order]


def _listed(call: Call, kind: str, data: list[Any], usage: dict[str, int]) -> bytes:
    return orjson.dumps(
        {
            "id": f"classify-{call.id}",
            "object": kind,
            "created": int(time.time()),
            "model": call.model,
            "data": data,
            "usage": usage,
        }
    )


def _tei_inputs(value: object, most: int) -> tuple[list[list[str]], bool]:
    """`inputs` as items of one text or two, and whether it is a batch.

    Raises:
        Problem: 400.
    """
    if isinstance(value, str):
        return [[value]], False
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value) and len(value) <= 2:
            return [value], False
        if all(_is_item(one) for one in value):
            return within(value, most, "inputs"), True
    raise invalid(
        'inputs is wrong; limit: "text", ["text", "pair"], or a batch [["text"], ["text", "pair"], ...]', "inputs"
    )


def _is_item(value: object) -> bool:
    return isinstance(value, list) and len(value) in (1, 2) and all(isinstance(one, str) for one in value)
