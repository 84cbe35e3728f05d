"""The entry's own settings, as render wrote them into config.pbtxt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BucketRoute:
    """One bucket: `length` in tokens, `batch` in texts, `answer` one of together | late | long."""

    length: int
    model: str
    batch: int
    answer: str


@dataclass(frozen=True)
class EntryConfig:
    """Typed view of the parameter `entry`; units as in builders.settings."""

    max_tokens: int
    max_text_bytes: int
    max_request_bytes: int
    tokenizer_threads: int
    wake_after_ms: float
    pad_id: int
    output: str
    dim: int
    late_bound: int
    long_workers: int
    long_bound: int
    buckets: tuple[BucketRoute, ...]

    @classmethod
    def from_model_config(cls, model_config: str) -> EntryConfig:
        """Read it from the JSON that Triton hands to `initialize`.

        Raises:
            KeyError, TypeError: the configuration was not rendered by this version of the project.
        """
        parameters: dict[str, Any] = json.loads(json.loads(model_config)["parameters"]["entry"]["string_value"])
        parameters["buckets"] = tuple(BucketRoute(**bucket) for bucket in parameters["buckets"])
        return cls(**parameters)
