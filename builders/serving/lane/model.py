"""Triton's side of a bucket model with a Python engine: one engine run per dynamic batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from lanes_lane.config import LaneConfig
from lanes_lane.engine import open_engine, warm_up


class TritonPythonModel:
    """The model `encoder_<bucket>`; contract in docs/architecture.md."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and run every batch step once, before Triton calls the model ready."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise RuntimeError(
                f"numpy {np.__version__} is installed where Triton's Python stub runs; limit: below 2, with which "
                "tensors arrive intact; to do: pip install 'numpy<2'"
            )
        config = LaneConfig.from_model_config(args["model_config"])
        os.nice(config.nice)
        self._output = config.output
        self._inputs = ("input_ids", "length", *(("segment_start",) if config.segment else ()))
        self._engine = open_engine(config, Path(args["model_repository"]) / args["model_version"])
        warm_up(self._engine, config)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Join the requests to one batch, run it, hand each request its rows."""
        parts = {
            name: [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self._inputs
        }
        answers = self._engine.run({name: _joined(part) for name, part in parts.items()})
        responses, begin = [], 0
        for part in parts["length"]:
            rows = answers[begin : begin + part.shape[0]]
            begin += part.shape[0]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(self._output, rows)]))
        return responses


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
