"""The CPU engine: ONNX Runtime on the exported graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray


class OnnxEngine:
    """An `Engine` on the CPU. A batch is trimmed to its own longest text: padding costs time here, shapes do not.

    Args:
        path: model.onnx with the lanes' contract.
        output: name of the output to compute.
        threads: threads of one run.
    """

    def __init__(self, path: Path, *, output: str, threads: int):
        """See the class."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin between runs would take the cores from the other buckets' processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._outputs = [output]

    def run(self, input_ids: NDArray[np.int32], length: NDArray[np.int32]) -> NDArray[np.float32]:
        """See `Engine.run`."""
        longest = max(1, int(length.max()))
        feeds = {"input_ids": np.ascontiguousarray(input_ids[:, :longest]), "length": length}
        vectors: NDArray[np.float32] = self._session.run(self._outputs, feeds)[0]
        return vectors
