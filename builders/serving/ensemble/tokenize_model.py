"""Triton's side of `tokenize_<bucket>`: the entry's own tokenising for one bucket, without a queue policy."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from lanes_ensemble.calls import AT_ONCE, QueueCalls
from lanes_ensemble.tensors import check_question, probe_tensors, step_tensors
from lanes_entry.config import EntryConfig
from lanes_entry.errors import Refusal
from lanes_entry.lastrow import LastRow
from lanes_entry.request import Question, read_question, shown
from lanes_entry.tokenise import Tokeniser

#: Names in pb_utils.TritonError, which the stub only fills in after this module is imported.
_CODES = {"invalid": "INVALID_ARG", "failed": "INTERNAL"}


class TritonPythonModel:
    """The model `tokenize_<bucket>`; contract in docs/queue.md, "Ensembles"."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokeniser; each version has its own parameters."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise RuntimeError(
                f"numpy {np.__version__} is installed where Triton's Python stub runs; limit: below 2, with which "
                "tensors arrive intact; to do: pip install 'numpy<2'"
            )
        version = args["model_version"]
        self._config = config = EntryConfig.from_model_config(args["model_config"], f"tokenize_{version}")
        folder = Path(args["model_repository"]) / version
        self._tokenise = Tokeniser(
            folder / "tokenizer.json", config.max_tokens, config.tokenizer_threads, segment=config.segment
        )
        self._tokenise(["warm up"])
        self._name = args["model_name"]
        self._last_row: LastRow | None = None
        if config.wake_after_ms > 0:
            (route,) = config.buckets
            probe = probe_tensors(route.length, segment=config.segment)
            # Counted for the queue's own model: rules.yml takes wake-ups off the rejects of the same model.
            calls = QueueCalls((route.model, version), route.model, config.output, probe, threading.Lock())
            self._last_row = LastRow(calls.wake, calls.last, config.wake_after_ms / 1000, self._log_error, AT_ONCE)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Tokenise all texts of a batch at once; a response or an error per request, in order."""
        questions = [self._read(request) for request in requests]
        read = iter(self._tokenise.read([question for question in questions if isinstance(question, Question)]))
        responses = [
            self._response(question if isinstance(question, Refusal) else next(read)) for question in questions
        ]
        if self._last_row:
            self._last_row.quiet()
        return responses

    def finalize(self) -> None:
        """End the threads."""
        if self._last_row:
            self._last_row.close()

    def _read(self, request: Any) -> Question | Refusal:
        try:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            second = pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR")
            pairs = None if second is None else second.as_numpy()
            return check_question(read_question(texts, pairs, request.parameters(), self._config))
        except Exception as error:  # whatever a client can send: it costs nobody else anything
            return Refusal("invalid", f"the request cannot be read: {type(error).__name__}: {shown(error)}")

    def _response(self, tokens: Any) -> Any:
        if isinstance(tokens, Refusal):
            code = getattr(pb_utils.TritonError, _CODES[tokens.kind])
            error = pb_utils.TritonError(tokens.message, code)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        tensors = step_tensors(tokens, self._config)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()])

    def _log_error(self, error: Exception) -> None:
        pb_utils.Logger.log_warn(f"the wake-up by {self._name} failed: {json.dumps(str(error))}")
