"""The entry's own settings, as render wrote them into config.pbtxt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Task = Literal["embedding", "classification", "reranking", "tagging", "answering"]
Pair = Literal["none", "optional", "required"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
#: Tasks whose lanes answer with a row per token.
PER_TOKEN = ("tagging", "answering")


@dataclass(frozen=True)
class BucketRoute:
    """One bucket: `length` in tokens, `batch` in texts, `answer` one of together | late | long."""

    length: int
    model: str
    batch: int
    answer: str


@dataclass(frozen=True)
class EntryConfig:
    """Typed view of the parameter `entry`; units as in builders.settings.

    Attributes:
        task: what the model answers.
        output: name of the lanes' output.
        size: last axis of the lanes' output: the vector's size, the number of labels, 2 for `answering`.
        pair: whether a request may or must bring TEXT_PAIR.
        segment: the lanes take `segment_start`.
        labels: names of the labels, in the order of the output.
        dimensions: sizes that a vector may be cut to, besides `size`.
        normalize: the vectors of the model have length 1.
        prompts: text by name, put before each text on request.
        default_prompt: name of the prompt when a request names none.
        overlap: tokens that two windows of truncate=chunk share when a request does not say.
        max_windows: windows of one request at most.
        aggregation: how tokens become entities when a request does not say.
        max_answer_tokens: longest answer, tokens.
        spans: folder that spans are recorded into; empty: none are.
    """

    max_tokens: int
    max_text_bytes: int
    max_request_bytes: int
    tokenizer_threads: int
    wake_after_ms: float
    pad_id: int
    output: str
    size: int
    late_bound: int
    long_workers: int
    long_bound: int
    buckets: tuple[BucketRoute, ...]
    task: Task
    pair: Pair
    segment: bool
    labels: tuple[str, ...]
    dimensions: tuple[int, ...]
    normalize: bool
    prompts: dict[str, str]
    default_prompt: str | None
    overlap: int
    max_windows: int
    aggregation: Aggregation
    max_answer_tokens: int
    spans: str = ""

    @classmethod
    def from_model_config(cls, model_config: str) -> EntryConfig:
        """Read it from the JSON that Triton hands to `initialize`.

        Raises:
            KeyError, TypeError: the configuration was not rendered by this version of the project.
        """
        parameters: dict[str, Any] = json.loads(json.loads(model_config)["parameters"]["entry"]["string_value"])
        parameters["buckets"] = tuple(BucketRoute(**bucket) for bucket in parameters["buckets"])
        for name in ("labels", "dimensions"):
            parameters[name] = tuple(parameters[name])
        return cls(**parameters)

    @property
    def per_token(self) -> bool:
        """The lanes answer with a row per token."""
        return self.task in PER_TOKEN

    def row_shape(self, route: BucketRoute) -> tuple[int, ...]:
        """What a bucket model answers for one row: [size], or [L, size] per token."""
        return (route.length, self.size) if self.per_token else (self.size,)
