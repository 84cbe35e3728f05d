"""Triton's side of `encoder_<bucket>_queued` with a Python engine: the lane, with a queue policy and its wake-up."""

from __future__ import annotations

import json
import threading
from typing import Any

import triton_python_backend_utils as pb_utils
from lanes_ensemble.calls import AT_ONCE, QueueCalls
from lanes_ensemble.tensors import probe_tensors
from lanes_entry.wakeup import WakeUp
from lanes_lane.config import LaneConfig
from lanes_lane.model import TritonPythonModel as LaneModel


class TritonPythonModel(LaneModel):  # type: ignore[misc]  # an import that only a version's folder has
    """The model `encoder_<bucket>_queued`; contract in docs/queue.md, "Ensembles"."""

    def initialize(self, args: dict[str, str]) -> None:
        """As the lane; then the wake-up of its own queue."""
        super().initialize(args)
        self._name = args["model_name"]
        config = LaneConfig.from_model_config(args["model_config"])
        after_ms = float(json.loads(args["model_config"])["parameters"]["wake_after_ms"]["string_value"])
        self._wakeup: WakeUp | None = None
        if after_ms > 0:
            probe = probe_tensors(config.length, segment=config.segment)
            # One thread at a time tells Triton of a metric: this wake-up's, or that of the lane's own ones.
            counting = self._metrics.telling if self._metrics else threading.Lock()
            calls = QueueCalls((self._name, args["model_version"]), self._name, config.output, probe, counting)
            self._wakeup = WakeUp(calls.wake, after_ms / 1000, self._log_error, AT_ONCE)

    def execute(self, requests: list[Any]) -> list[Any]:
        """As the lane."""
        if self._wakeup:
            self._wakeup.busy()
        try:
            return list(super().execute(requests))
        finally:
            if self._wakeup:
                self._wakeup.quiet()

    def finalize(self) -> None:
        """End the threads."""
        if self._wakeup:
            self._wakeup.close()
        super().finalize()

    def _log_error(self, error: Exception) -> None:
        pb_utils.Logger.log_warn(f"the wake-up of {self._name} failed: {json.dumps(str(error))}")
