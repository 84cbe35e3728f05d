"""The CPU engine: ONNX Runtime on the exported graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from .processor import int8_saturates


class OnnxEngine:
    """An `Engine` on the CPU. A batch is trimmed to its own longest text: padding costs time here, shapes do not.

    Args:
        path: model.onnx with the lanes' contract.
        output: name of the output to compute.
        per_token: it has a row for each token; the rows that were trimmed come back as zeros.
        threads: threads of one run.
    """

    def __init__(self, path: Path, *, output: str, per_token: bool, threads: int):
        """See the class."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin between runs would take the cores from the other buckets' processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if int8_saturates():
            options.add_session_config_entry("session.x64quantprecision", "1")
        # ONNX Runtime's one kernel for a residual sum and its norm is slower than the two it replaces: without it a
        # MiniLM text takes 7 % less, in int8 10 % (one thread, ONNX Runtime 1.32). The sums are the same but for order.
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
        )
        self._outputs, self._per_token = [output], per_token

    def run(self, inputs: Mapping[str, NDArray[np.int32]]) -> NDArray[np.float32]:
        """See `Engine.run`."""
        ids = inputs["input_ids"]
        longest = max(1, int(inputs["length"].max()))
        feeds = {**inputs, "input_ids": np.ascontiguousarray(ids[:, :longest])}
        found: NDArray[np.float32] = self._session.run(self._outputs, feeds)[0]
        if not self._per_token or longest == ids.shape[1]:
            return found
        # Triton knows the output's shape from the configuration: always the bucket's.
        whole = np.zeros((len(ids), ids.shape[1], found.shape[2]), dtype=np.float32)
        whole[:, :longest] = found
        return whole
