"""Triton's side of the entry: a thin adapter between `pb_utils` and the modules of `entry`.

Non-decoupled: `execute` returns a list with one response or None per request; a None is answered later through the
request's own response sender. Sources: python_backend's README, "BLS" and "Request Rescheduling"; measured on 2.51.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from lanes_entry.config import BucketRoute, EntryConfig
from lanes_entry.dispatch import Dispatcher
from lanes_entry.errors import LaneError, Refusal
from lanes_entry.group import LaneInputs
from lanes_entry.metrics import Counter
from lanes_entry.request import Question, read_question, shown
from lanes_entry.spans import Spans
from lanes_entry.tasks import answer_tensors, open_task
from lanes_entry.ticket import Ticket
from lanes_entry.tokenise import Tokeniser
from lanes_entry.wakeup import WakeUp
from lanes_entry.warmup import FirstCalls

#: Names in pb_utils.TritonError, which the stub only fills in after this module is imported.
CODES = {
    "invalid": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "failed": "INTERNAL",
}


class TritonPythonModel:
    """The model `encode`; contract in docs/architecture.md."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokeniser, start the threads. BLS calls are not possible here yet."""
        if int(np.__version__.split(".")[0]) >= 2:
            raise RuntimeError(
                f"numpy {np.__version__} is installed where Triton's Python stub runs; limit: below 2, with which "
                "tensors arrive intact; to do: pip install 'numpy<2'"
            )
        self._name, self._version = args["model_name"], int(args["model_version"])
        self._config = EntryConfig.from_model_config(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        self._tokenise = Tokeniser(
            folder / "tokenizer.json",
            self._config.max_tokens,
            self._config.tokenizer_threads,
            spans=self._config.per_token,
            segment=self._config.segment,
            overlap=self._config.overlap,
            max_windows=self._config.max_windows,
        )
        self._tokenise(["warm up"])
        self._spans = Spans(self._config.spans, self._name)
        self._task = open_task(self._config, self._tokenise)
        self._dispatcher = Dispatcher(self._config, self._call_lane)
        wakeups = pb_utils.MetricFamily(
            name="encoder_lanes_wakeups_total",
            description="Wake-ups sent to the entry's own queue; Triton counts each as a request rejected",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._wakeups = Counter(wakeups, {"model": self._name, "version": str(self._version)})
        self._wakeup: WakeUp | None = None
        if self._config.wake_after_ms > 0:
            self._wakeup = WakeUp(self._wake_queue, self._config.wake_after_ms / 1000, self._log_wakeup_error)
        warm = pb_utils.MetricFamily(
            name="encoder_lanes_warm_processes_total",
            description="Processes of the entry that have made their own first calls; `of` is how many it has",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        config = json.loads(args["model_config"])
        count = sum(group["count"] for group in config["instance_group"])
        self._warm = Counter(warm, {"model": self._name, "version": str(self._version), "of": str(count)})
        self._first_calls = FirstCalls(self._config.buckets, self._first_call, self._warm.add, pb_utils.Logger.log_warn)
        # Triton runs the warm-up of the configuration in every process, before any other request.
        self._warm_up = bool(config.get("model_warmup"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch: a response or None (answered later) per request, in order."""
        # Not earlier: a call before the server has made the instance whole has brought it down (docs/queue.md).
        self._first_calls.start()
        if self._warm_up:
            self._warm_up = False
            if all(_is_empty(request) for request in requests):
                return [self._warm_answer(request) for request in requests]
        if self._wakeup:
            self._wakeup.busy()
        span = self._spans.now()
        try:
            questions = [self._read(request) for request in requests]
            span = self._spans.add("decode", span, len(requests))
            tickets = self._tickets(requests, questions)
            span = self._spans.add("tokenise", span, len(requests))
            batch = self._dispatcher.route(ticket for ticket in tickets if ticket.refusal is None)
            for request, ticket in zip(requests, tickets, strict=True):
                if ticket.late:
                    self._answer_late(ticket, request)
            late = [ticket.late for ticket in tickets]
            span = self._spans.add("group", span, len(requests))
            self._dispatcher.run(batch)
            span = self._spans.add("lanes", span, len(requests))
            responses = [None if later else self._response(ticket) for later, ticket in zip(late, tickets, strict=True)]
            self._spans.add("respond", span, len(requests))
            return responses
        finally:
            if self._wakeup:
                self._wakeup.quiet()

    def finalize(self) -> None:
        """End the threads; Triton has no request of ours in flight any more."""
        self._first_calls.close()
        if self._wakeup:
            self._wakeup.close()
        self._dispatcher.close()
        self._spans.close()

    def _read(self, request: Any) -> Question | Refusal:
        try:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            second = pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR")
            pairs = None if second is None else second.as_numpy()
            return read_question(texts, pairs, request.parameters(), self._config)
        except Exception as error:  # whatever a client can send: it costs nobody else anything
            return Refusal("invalid", f"the request cannot be read: {type(error).__name__}: {shown(error)}")

    def _tickets(self, requests: list[Any], questions: list[Question | Refusal]) -> list[Ticket]:
        """Tokenise the texts of all requests at once and hand them back to their requests."""
        read = iter(self._tokenise.read([question for question in questions if isinstance(question, Question)]))
        tickets = []
        for request, question in zip(requests, questions, strict=True):
            tokens = question if isinstance(question, Refusal) else next(read)
            if isinstance(question, Refusal) or isinstance(tokens, Refusal):
                ticket = Ticket([], cancelled=request.is_cancelled)
                ticket.refuse(tokens)
            else:
                ticket = Ticket(tokens, question, request.is_cancelled)
            tickets.append(ticket)
        return tickets

    def _call_lane(self, route: BucketRoute, inputs: LaneInputs) -> Any:
        """One BLS call, pinned to this version; FP32 [b, size] or [b, L, size]."""
        response = pb_utils.InferenceRequest(
            model_name=route.model,
            model_version=self._version,
            requested_output_names=[self._config.output],
            inputs=[pb_utils.Tensor(name, tensor) for name, tensor in inputs.items()],
            # A GPU model's answer would stay in GPU memory, where numpy cannot read it.
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            message = response.error().message()
            gone = any(part in message for part in ("not ready", "unknown model", "unloaded", "is not healthy"))
            raise LaneError("overloaded" if gone else "failed", f"{route.model}: {message}")
        output = pb_utils.get_output_tensor_by_name(response, self._config.output)
        return np.array(output.as_numpy(), dtype=np.float32)

    def _first_call(self, route: BucketRoute) -> None:
        """A full batch of one-token texts: the CPU engine trims it, the GPU engine and shared memory take all of it."""
        one = np.ones((route.batch, 1), dtype=np.int32)
        inputs = {"input_ids": np.zeros((route.batch, route.length), dtype=np.int32), "length": one}
        self._call_lane(route, inputs | {"segment_start": one} if self._config.segment else inputs)

    def _warm_answer(self, request: Any) -> Any:
        """To Triton's own warm-up, which comes before there are lanes: nothing is asked of them."""
        rows = len(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy())
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOKENS", np.zeros((rows, 1), dtype=np.int32))])

    def _answer_late(self, ticket: Ticket, request: Any) -> None:
        """Let the ticket answer through a response sender, after `execute` has returned."""
        try:
            sender = request.get_response_sender()
        except Exception as error:  # this request alone, and at once
            ticket.late = False
            ticket.refuse(Refusal("failed", f"the request cannot be answered late: {shown(error)}"))
            return

        def send(done: Ticket) -> None:
            sender.send(self._response(done), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        ticket.send = send
        # The request itself is gone once `execute` has returned: asking it would read freed memory and has brought
        # the server down (2.51). The sender lives until it has sent.
        ticket.cancelled = sender.is_cancelled

    def _response(self, ticket: Ticket) -> Any:
        if ticket.refusal is None and not ticket.complete:
            # Must not happen; if it does, the client gets an error and not memory that nobody has written.
            ticket.refuse(Refusal("failed", "a text of the request was not computed; please report this"))
        tensors = {}
        if ticket.refusal is None:
            try:
                tensors = answer_tensors(self._task, ticket)
            except Exception as error:  # this request alone
                ticket.refuse(Refusal("failed", f"no answer could be made: {type(error).__name__}: {shown(error)}"))
        if ticket.refusal is not None:
            code = getattr(pb_utils.TritonError, CODES[ticket.refusal.kind])
            refused = pb_utils.TritonError(ticket.refusal.message, code)
            return pb_utils.InferenceResponse(output_tensors=[], error=refused)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()])

    def _wake_queue(self) -> bool:
        """Send a request that has expired before any instance can take it; True when it was rejected for that."""
        self._wakeups.add()
        response = self._own_request(b"", timeout=1).exec()
        return response.has_error() and "timeout expired" in response.error().message()

    def _own_request(self, text: bytes, timeout: int) -> Any:
        """A request to this version of the entry; `timeout` in microseconds."""
        # What the model needs for a request to be taken into the queue at all.
        names = ("TEXT",) if self._config.pair != "required" else ("TEXT", "TEXT_PAIR")
        return pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            requested_output_names=["TOKENS"],
            inputs=[pb_utils.Tensor(name, np.array([[text]], dtype=np.object_)) for name in names],
            timeout=timeout,
        )

    def _log_wakeup_error(self, error: Exception) -> None:
        pb_utils.Logger.log_warn(f"the wake-up of {self._name} failed: {json.dumps(str(error))}")


def _is_empty(request: Any) -> bool:
    """Whether its texts are empty, as those of Triton's warm-up are."""
    return not any(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel().tolist())
