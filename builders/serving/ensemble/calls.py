"""Requests to `encoder_<bucket>_queued` that move its queue: Triton's side of waking it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import triton_python_backend_utils as pb_utils
from lanes_entry.metrics import WAKEUPS

#: Wake-ups under way at the same time: Triton carries 32 calls of a process at once (thread-pool-size), and a wake-up
#: is rejected only when its turn comes.
AT_ONCE = 30


class QueueCalls:
    """Sends requests to one version of a model, from any thread; made in `initialize`.

    Args:
        caller: the calling model and its version, for the metric.
        model: the model with the queue.
        output: one of its outputs.
        inputs: the smallest request that it takes.
        counting: held while the metric is told; two increments of one process at once bring the server down
            (lanes_entry.metrics).
    """

    def __init__(
        self,
        caller: tuple[str, str],
        model: str,
        output: str,
        inputs: Mapping[str, Any],
        counting: AbstractContextManager[Any],
    ):
        """See the class."""
        self._model, self._output, self._inputs = model, output, inputs
        self._version = int(caller[1])
        # Kept: an increment fails once its family is gone.
        self._family = pb_utils.MetricFamily(
            name=WAKEUPS.name, description=WAKEUPS.description, kind=pb_utils.MetricFamily.COUNTER
        )
        self._count = self._family.Metric(labels={"model": caller[0], "version": caller[1]})
        self._counting = counting

    def wake(self) -> bool:
        """Send a request that has expired before any instance can take it; True when it was rejected for that."""
        with self._counting:
            self._count.increment(1)
        response = self._request(timeout=1).exec()
        return response.has_error() and "timeout expired" in response.error().message()

    def last(self) -> None:
        """Send a row behind all that waits, and wait for its answer or its rejection."""
        self._request().exec()

    def _request(self, **options: int) -> Any:
        return pb_utils.InferenceRequest(
            model_name=self._model,
            model_version=self._version,
            requested_output_names=[self._output],
            inputs=[pb_utils.Tensor(name, tensor) for name, tensor in self._inputs.items()],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
            **options,
        )
