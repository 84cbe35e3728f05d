"""The `Engine` protocol: what a bucket model needs of whatever computes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import LaneConfig


class Engine(Protocol):
    """Computes batches of one bucket."""

    def run(self, inputs: Mapping[str, NDArray[np.int32]]) -> NDArray[np.float32]:
        """Compute one batch.

        Args:
            inputs: `input_ids` INT32 [b, L], padded to the bucket, `length` INT32 [b, 1], tokens of each text, and,
                where the lane takes it, `segment_start` INT32 [b, 1], the first token of the second text.

        Returns:
            FP32 [b, size], or [b, L, size] with a row for each token.
        """
        ...


def open_engine(config: LaneConfig, folder: Path) -> Engine:
    """The engine a configuration names, loaded from a version directory.

    Raises:
        ValueError: no such engine.
    """
    if config.engine == "onnxruntime":
        from .onnx_engine import OnnxEngine

        return OnnxEngine(
            folder / config.file, output=config.output, per_token=config.per_token, threads=config.threads
        )
    if config.engine == "tensorrt":
        from .tensorrt_engine import TensorRTEngine, TensorRTOptions

        return TensorRTEngine(
            folder / config.file,
            length=config.length,
            steps=config.steps,
            output=config.output,
            options=TensorRTOptions.read(config.options),
        )
    raise ValueError(
        f"engine {config.engine!r} is not known; known: onnxruntime, tensorrt; render the configuration again"
    )


def warm_up(engine: Engine, config: LaneConfig) -> None:
    """Run every batch step at full length, so that the first real batch finds everything allocated."""
    for step in config.steps:
        full = np.full((step, 1), config.length, dtype=np.int32)
        # Token 0 is in every vocabulary; what it means does not matter here.
        inputs = {"input_ids": np.zeros((step, config.length), dtype=np.int32), "length": full}
        engine.run(inputs | {"segment_start": full} if config.segment else inputs)
