"""The `Engine` protocol: what a bucket model needs of whatever computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import LaneConfig


class Engine(Protocol):
    """Computes batches of one bucket."""

    def run(self, input_ids: NDArray[np.int32], length: NDArray[np.int32]) -> NDArray[np.float32]:
        """Compute one batch.

        Args:
            input_ids: INT32 [b, L], padded to the bucket.
            length: INT32 [b, 1], tokens of each text.

        Returns:
            FP32 [b, dim] (or the task's own last axis).
        """
        ...


def open_engine(config: LaneConfig, folder: Path) -> Engine:
    """The engine a configuration names, loaded from a version directory.

    Raises:
        ValueError: no such engine.
    """
    if config.engine == "onnxruntime":
        from .onnx_engine import OnnxEngine

        return OnnxEngine(folder / config.file, output=config.output, threads=config.threads)
    raise ValueError(f"engine {config.engine!r} is not known; known: onnxruntime; render the configuration again")


def warm_up(engine: Engine, length: int, steps: tuple[int, ...]) -> None:
    """Run every batch step at full length, so that the first real batch finds everything allocated."""
    for step in steps:
        # Token 0 is in every vocabulary; what it means does not matter here.
        engine.run(np.zeros((step, length), dtype=np.int32), np.full((step, 1), length, dtype=np.int32))
