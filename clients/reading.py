"""Answers of the entry model, held to its contract and put together as results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.errors import ServerFailure
from clients.exchange import Answered
from clients.result import (
    Answer,
    AnswerResult,
    ClassifyResult,
    EncodeResult,
    Entity,
    Floats,
    Ints,
    RerankResult,
    TagResult,
)
from clients.wire import Array

#: The entry's output by task, and whether its columns are counted (one column of JSON otherwise).
OUTPUTS = {
    "embedding": "EMBEDDING",
    "classification": "SCORES",
    "reranking": "SCORES",
    "tagging": "ENTITIES",
    "answering": "ANSWERS",
}
_FORMS = {
    "EMBEDDING": "FP32 [n, dim]",
    "SCORES": "FP32 [n, labels]",
    "ENTITIES": "BYTES [n, 1]",
    "ANSWERS": "BYTES [n, 1]",
    "TOKENS": "INT32 [n, 1]",
    "CUT": "INT32 [n, 1]",
}


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one or more answers."""

    values: Array
    """[n, columns]: float32, or bytes objects."""
    tokens: Ints
    cut: Ints
    versions: frozenset[str]
    """Of the models that answered."""


def read(answered: Answered, task: str, url: str) -> Arrays:
    """The arrays of one answer, views of it and read-only.

    Raises:
        ServerFailure: an output is missing or of another dtype or shape than the entry's.
    """
    values, tokens, cut = (_output(answered, name, task, url) for name in (OUTPUTS[task], "TOKENS", "CUT"))
    return Arrays(values, tokens[:, 0], cut[:, 0], frozenset([answered.answer.version]))


def _output(answered: Answered, name: str, task: str, url: str) -> Array:
    array, n, form = answered.answer.tensors.get(name), len(answered.texts), _FORMS[name]
    dtype = {"FP32": np.float32, "INT32": np.int32, "BYTES": np.object_}[form.split()[0]]
    fits = array is not None and array.dtype == dtype and array.ndim == 2 and len(array) == n
    if array is None or not fits or (form.endswith("1]") and array.shape[1] != 1):
        raise ServerFailure(
            f"the answer's {name} is not the entry model's",
            value=None if array is None else f"{array.dtype} {list(array.shape)}",
            limit=f"{form} with n = {n}",
            remedy=f"name the entry model of a repository whose task is {task}",
            url=url,
            texts=answered.texts,
        )
    return array


def join(parts: Sequence[Arrays], url: str) -> Arrays:
    """The arrays of all answers of a call, in new arrays.

    Raises:
        ServerFailure: they do not have as many columns.
    """
    columns = sorted({part.values.shape[1] for part in parts})
    if len(columns) > 1:
        raise ServerFailure(
            "the requests of the call were answered by models of different dim",
            value=columns,
            remedy="call again; the served model changed meanwhile",
            url=url,
        )
    return Arrays(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.cut for part in parts]),
        frozenset().union(*(part.versions for part in parts)),
    )


def no_arrays(columns: int, dtype: Any = np.float32) -> Arrays:
    """The arrays of no texts."""
    return Arrays(np.empty((0, columns), dtype), np.empty(0, np.int32), np.empty(0, np.int32), frozenset())


def encode_result(arrays: Arrays, retries: int) -> EncodeResult:
    """The result of `encode`."""
    return EncodeResult(arrays.values, arrays.tokens, arrays.cut, retries)


def classify_result(
    arrays: Arrays, labels: tuple[str, ...], top_k: int | None, retries: int, url: str
) -> ClassifyResult:
    """The result of `classify`.

    Raises:
        ServerFailure: there are not as many labels as scores.
    """
    if arrays.values.shape[1] != len(labels):
        raise ServerFailure(
            f"the model names {len(labels)} labels and gives {arrays.values.shape[1]} scores a text",
            remedy="call again if the served model changed meanwhile; otherwise publish it anew",
            url=url,
        )
    return ClassifyResult(labels, arrays.values, arrays.tokens, arrays.cut, top_k, retries)


def rerank_result(arrays: Arrays, documents: list[bytes], top_n: int | None, retries: int, url: str) -> RerankResult:
    """The result of `rerank`: sorted, the best first.

    Raises:
        ServerFailure: the model gives more than one score a pair.
    """
    if arrays.values.shape[1] != 1:
        raise ServerFailure(
            f"the model gives {arrays.values.shape[1]} scores a pair, so none of them is its rank",
            limit="a reranking model: one score",
            remedy="use classify with pairs=, or name another model",
            url=url,
        )
    order = np.argsort(-arrays.values[:, 0], kind="stable")[:top_n]
    return RerankResult(
        order.astype(np.int64),
        arrays.values[order, 0],
        tuple(documents[index].decode() for index in order),
        arrays.tokens[order],
        arrays.cut[order],
        retries,
    )


def tag_result(arrays: Arrays, retries: int, url: str) -> TagResult:
    """The result of `tag`.

    Raises:
        ServerFailure: an item is not the entry's JSON.
    """
    entities = []
    for index, item in enumerate(arrays.values[:, 0]):
        try:
            entities.append(tuple(_entity(one) for one in json.loads(item)))
        except (ValueError, KeyError, TypeError) as error:
            raise _no_json("ENTITIES", index, item, error, url) from None
    return TagResult(tuple(entities), arrays.tokens, arrays.cut, retries)


def _entity(one: dict[str, Any]) -> Entity:
    label = one["entity_group"] if "entity_group" in one else one["entity"]
    return Entity(str(label), float(one["score"]), str(one["word"]), int(one["start"]), int(one["end"]))


def answer_result(arrays: Arrays, retries: int, url: str) -> AnswerResult:
    """The result of `answer`.

    Raises:
        ServerFailure: an item is not the entry's JSON.
    """
    answers = []
    for index, item in enumerate(arrays.values[:, 0]):
        try:
            one = json.loads(item)
            answers.append(Answer(str(one["answer"]), float(one["score"]), int(one["start"]), int(one["end"])))
        except (ValueError, KeyError, TypeError) as error:
            raise _no_json("ANSWERS", index, item, error, url) from None
    return AnswerResult(tuple(answers), arrays.tokens, arrays.cut, retries)


def _no_json(name: str, index: int, item: bytes, error: Exception, url: str) -> ServerFailure:
    return ServerFailure(
        f"the answer's {name} cannot be read ({error!r})",
        value=item,
        url=url,
        texts=range(index, index + 1),
        remedy="use a client of the server's own version",
    )


def cosines(result: EncodeResult, first: int, others: bool) -> Floats:
    """Cosine of each of the first embeddings with each of the others, or with one another.

    Returns:
        float32 [first, n - first], or [n, n] without others; 0 where an embedding is all zeros.
    """
    unit = _unit(result.embeddings)
    return np.asarray(unit[:first] @ (unit[first:] if others else unit).T, np.float32)


def _unit(embeddings: Array) -> Array:
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.divide(embeddings, lengths, out=np.zeros_like(embeddings), where=lengths > 0)
