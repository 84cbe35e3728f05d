"""The entry's own settings, as render wrote them into config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Task = Literal["embedding", "classification", "reranking", "tagging", "answering"]
Pair = Literal["none", "optional", "required"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Level = Literal["interactive", "background"]
LEVELS: tuple[Level, ...] = get_args(Level)
#: Tasks whose lanes answer with a row per token.
PER_TOKEN = ("tagging", "answering")


@dataclass(frozen=True)
class BucketRoute:
    """One bucket: `length` in tokens, `batch` in texts, `answer` one of together | late | long."""

    length: int
    model: str
    batch: int
    answer: str

    @property
    def lane(self) -> str:
        """Name of its lane: short or long."""
        return "long" if self.answer == "long" else "short"


@dataclass(frozen=True)
class DegradeConfig:
    """Small batches under backlog; see `backlog`.

    Attributes:
        above: requests waiting in the entry's queue from which on the batches are small.
        below: fewer than this, for a while, and they are normal again.
        batch: texts of a small one.
        metrics_url: Triton's own metrics, where the waiting requests are read.
        interval_s: seconds between two looks of one process.
    """

    above: int
    below: int
    batch: int
    metrics_url: str
    interval_s: float


@dataclass(frozen=True)
class EntryConfig:
    """Typed view of the parameter `entry`; units as in builders.settings.

    Attributes:
        timeouts_ms: longest wait in the long lane by level.
        long_background_every: while both levels wait in the long lane, one group of so many is background's.
        degrade: small batches under backlog; None: never.
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
        processes: of this model, by its `instance_group`.
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
    long_background_every: int
    timeouts_ms: dict[Level, float]
    degrade: DegradeConfig | None
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
    processes: int = 1

    @classmethod
    def from_model_config(cls, model_config: str, parameter: str = "entry") -> EntryConfig:
        """Read it from the JSON that Triton hands to `initialize`; the steps of ensembles have other parameters.

        Raises:
            KeyError, TypeError: the configuration was not rendered by this version of the project.
        """
        config = json.loads(model_config)
        given = json.loads(config["parameters"][parameter]["string_value"])
        return cls.from_parameters(given, sum(group["count"] for group in config["instance_group"]))

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any], processes: int) -> EntryConfig:
        """From the parameter's value, and the processes of the model.

        Raises:
            KeyError, TypeError: it is not one that this version of the project writes.
        """
        parameters: dict[str, Any] = {**given, "processes": processes}
        parameters["buckets"] = tuple(BucketRoute(**bucket) for bucket in parameters["buckets"])
        if parameters["degrade"] is not None:
            parameters["degrade"] = DegradeConfig(**parameters["degrade"])
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
