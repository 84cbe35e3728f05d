"""The lane's own settings, as render wrote them into config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LaneConfig:
    """Typed view of the parameter `lane`.

    Attributes:
        engine: name of the engine.
        file: the engine's file in the version directory.
        length: bucket length, tokens.
        output: name of the output tensor.
        per_token: it has a row for each token of the bucket.
        segment: the lane takes `segment_start`.
        steps: batch sizes that are warmed up.
        threads: threads of the engine.
        nice: niceness of this process.
        options: the named engine's own settings.
        spans: folder that spans are recorded into; empty: none are.
    """

    engine: str
    file: str
    length: int
    output: str
    per_token: bool
    segment: bool
    steps: tuple[int, ...]
    threads: int
    nice: int
    options: Mapping[str, Any] = field(default_factory=dict)
    spans: str = ""

    @classmethod
    def from_model_config(cls, model_config: str) -> LaneConfig:
        """Read it from the JSON that Triton hands to `initialize`.

        Raises:
            KeyError, TypeError: the configuration was not rendered by this version of the project.
        """
        parameters: dict[str, Any] = json.loads(json.loads(model_config)["parameters"]["lane"]["string_value"])
        parameters["steps"] = tuple(parameters["steps"])
        return cls(**parameters)
