"""POST /v1/embeddings, in OpenAI's form: https://platform.openai.com/docs/api-reference/embeddings/create.

Two fields are the door's own, for `extra_body` of OpenAI's clients: `truncate` and `prompt_name` (as TEI names it).
`user` is taken and not used.
"""

from __future__ import annotations

import base64

import numpy as np
import orjson

from clients.door.bodies import EmbeddingsBody, parse, read_json, texts_of
from clients.door.call import Call, check_finite
from clients.door.catalog import Model
from clients.door.endpoint import breathe
from clients.door.problems import invalid
from clients.result import Floats

_AT_ONCE = 32


async def embeddings(call: Call, body: bytes) -> bytes:
    """Encodes the texts.

    Args:
        call: the request.
        body: its JSON; `input` is a text, texts, the token ids of a text, or those of several.

    Returns:
        JSON: `data` has one object a text, with `embedding` as numbers, or as base64 of float32, little-endian.

    Raises:
        Problem: see `problems`.
        EncoderError: the call to the server failed.
    """
    door, form = call.door, parse(EmbeddingsBody, read_json(body))
    texts = await texts_of(form.input, door.ids, door.settings.max_inputs)
    model = await call.find(form.model, "embedding")
    dimensions = _dimensions(form.dimensions, model)
    call.take(len(texts))
    result = await model.client.encode(
        texts, prompt=form.prompt_name, dimensions=dimensions, **call.options(form.truncate)
    )
    usage = call.spent(result.tokens, result.cut)
    check_finite(result.embeddings)
    rows = await _rows(result.embeddings, form.encoding_format == "base64")
    tail = orjson.dumps({"object": "list", "model": model.name, "usage": usage})
    return b'{"data":[' + b",".join(rows) + b"]," + tail[1:]


async def _rows(embeddings: Floats, in_base64: bool) -> list[bytes]:
    """The objects of `data`, as JSON, some at a time."""
    numbers, rows = np.ascontiguousarray(embeddings, "<f4"), []
    for first in range(0, len(numbers), _AT_ONCE):
        await breathe(first)
        part = [
            {
                "object": "embedding",
                "index": first + at,
                "embedding": base64.b64encode(row.tobytes()).decode() if in_base64 else row,
            }
            for at, row in enumerate(numbers[first : first + _AT_ONCE])
        ]
        rows.append(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return rows


def _dimensions(asked: int | None, model: Model) -> int | None:
    """The model's own size need not be asked for."""
    facts = model.facts
    if not asked or asked == facts.size:
        return None
    if asked not in facts.dimensions:
        sizes = ", ".join(str(one) for one in sorted({*facts.dimensions, *([facts.size] if facts.size else [])}))
        raise invalid(f"dimensions is {asked}; limit: {sizes} of model {model.name!r}", "dimensions")
    return asked
