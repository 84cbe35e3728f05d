"""What a model says of itself in its configuration: task, labels, limits, sizes, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clients.errors import ServerFailure


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """An entry model's own description, from the parameters of its configuration; empty where it names none."""

    name: str
    task: str
    """embedding, classification, reranking, tagging or answering."""
    size: int | None
    """Columns of EMBEDDING or SCORES; the longest where a request may choose; None when the model does not say."""
    labels: tuple[str, ...] = ()
    """In the order of the scores."""
    dimensions: tuple[int, ...] = ()
    """Sizes that `encode` may ask for, the whole one among them."""
    prompts: tuple[str, ...] = ()
    """Names of prompts that `encode` may ask for."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """max_tokens, max_texts, max_text_bytes, max_request_bytes, max_windows (whole numbers), buckets (a list)."""


_SIZED = {"EMBEDDING": "embedding", "SCORES": "classification", "ENTITIES": "tagging", "ANSWERS": "answering"}


def read_facts(config: Mapping[str, Any], url: str) -> ModelFacts:
    """Reads a model's configuration, as the v2 protocol gives it.

    Raises:
        ServerFailure: a parameter is not what this client understands.
    """
    given = {name: str(value.get("string_value", "")) for name, value in config.get("parameters", {}).items()}
    try:
        outputs = {output["name"]: output for output in config.get("output", ())}
        named = next((name for name in _SIZED if name in outputs), None)
        size = int(outputs[named]["dims"][-1]) if named in ("EMBEDDING", "SCORES") else None
        dimensions = tuple(int(number) for number in json.loads(given.get("dimensions") or "[]"))
        if size is not None and size < 1:
            size = max(dimensions, default=None)
        return ModelFacts(
            name=str(config.get("name", "")),
            task=given.get("task") or _SIZED.get(named or "", ""),
            size=size,
            labels=tuple(str(label) for label in json.loads(given.get("labels") or "[]")),
            dimensions=dimensions,
            prompts=tuple(str(name) for name in json.loads(given.get("prompts") or "[]")),
            limits=dict(json.loads(given.get("limits") or "{}")),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise ServerFailure(
            "the model's configuration cannot be read",
            value=repr(error),
            remedy="use a client of the server's own version",
            url=url,
        ) from None
