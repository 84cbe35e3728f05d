"""Triton's side of a bucket model with a Python engine: one engine run per dynamic batch.

An engine that overlaps answers from a thread: `execute` returns None for each request as soon as its batch is in the
GPU's stream, so that Triton hands over the next batch while this one runs. Source: python_backend's README, "Request
Rescheduling"; measured on 2.51.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from lanes_lane.answers import Answers, slices
from lanes_lane.config import LaneConfig
from lanes_lane.engine import open_engine, warm_up
from lanes_lane.errors import EngineBrokenError, EngineError
from lanes_lane.metrics import LaneMetrics
from lanes_lane.spans import Spans


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
        if args.get("model_instance_kind") == "GPU":
            config = replace(config, options={**config.options, "device": int(args["model_instance_device_id"])})
        os.nice(config.nice)
        self._output = config.output
        self._inputs = ("input_ids", "length", *(("segment_start",) if config.segment else ()))
        self._engine: Any = open_engine(config, Path(args["model_repository"]) / args["model_version"])
        warm_up(self._engine, config)
        self._spans = Spans(config.spans, args["model_name"])
        self._done = 0.0
        self._answers: Answers | None = None
        self._metrics: LaneMetrics | None = None
        if config.engine == "tensorrt":
            warm_up(self._engine, replace(config, steps=config.steps[::-1]))  # the other slot, too
            self._engine.seal()
            labels = {"model": args["model_name"], "version": args["model_version"]}
            self._metrics = LaneMetrics(pb_utils, labels, self._engine.metrics, pb_utils.Logger.log_warn)
            if self._engine.overlaps:
                self._answers = Answers(self._collect, self._log_lost_answer)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Join the requests to one batch, run it, hand each request its rows."""
        begin = self._spans.now()
        parts = [{name: _tensor(request, name) for name in self._inputs} for request in requests]
        sizes = [len(part["input_ids"]) for part in parts]
        if self._answers is not None:
            return self._start(requests, parts, sizes, self._answers)
        try:
            joined = {name: _joined([part[name] for part in parts]) for name in self._inputs}
            begin = self._spans.add("copy", begin, sum(sizes))
            answers = self._engine.run(joined)
        except EngineError as error:
            return [self._error(error) for _ in requests]
        begin = self._spans.add("execute", begin, sum(sizes))
        responses = [self._response(answers[rows]) for rows in slices(sizes)]
        self._spans.add("respond", begin, sum(sizes))
        return responses

    def finalize(self) -> None:
        """Answer what is under way, give the engine's memory back."""
        if self._answers is not None:
            self._answers.close()
        self._spans.close()
        if self._metrics is not None:
            self._metrics.close()
            self._engine.close()

    def _start(self, requests: list[Any], parts: list[dict[str, Any]], sizes: list[int], answers: Answers) -> list[Any]:
        try:
            pending = self._engine.submit(parts)
        except EngineError as error:
            return [self._error(error) for _ in requests]
        # The requests themselves are gone once this has returned; their senders live until they have sent.
        senders = [request.get_response_sender() for request in requests]
        self._spans.add("copy", pending.begin, sum(sizes), pending.launched)
        answers.put(pending, self._sender_of(senders, sizes))
        return [None] * len(requests)

    def _collect(self, pending: Any) -> Any:
        rows = self._engine.collect(pending)
        # One batch runs at a time: this one began when the one before it was done, or when it was launched.
        begin = max(pending.launched, self._done)
        self._done = self._spans.add("execute", begin, pending.rows)
        return rows

    def _sender_of(self, senders: list[Any], sizes: list[int]) -> Callable[[Any, Exception | None], None]:
        def send(vectors: Any, failure: Exception | None) -> None:
            begin = self._spans.now()
            for sender, rows in zip(senders, slices(sizes), strict=True):
                response = self._response(vectors[rows]) if failure is None else self._error(failure)
                try:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                except Exception as error:  # its client is gone; the others want their answers
                    self._log_lost_answer(error)
            self._spans.add("respond", begin, sum(sizes))

        return send

    def _response(self, rows: Any) -> Any:
        return pb_utils.InferenceResponse([pb_utils.Tensor(self._output, rows)])

    def _error(self, error: Exception) -> Any:
        code = (
            pb_utils.TritonError.UNAVAILABLE if isinstance(error, EngineBrokenError) else pb_utils.TritonError.INTERNAL
        )
        return pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error), code))

    def _log_lost_answer(self, error: Exception) -> None:
        pb_utils.Logger.log_warn(f"an answer could not be sent: {error}")


def _tensor(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
