"""Triton's side of the entry: a thin adapter between `pb_utils` and the modules of `entry`.

Non-decoupled: `execute` returns a list with one response or None per request; a None is answered later through the
request's own response sender. Sources: python_backend's README, "BLS" and "Request Rescheduling"; measured on 2.51.
"""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from lanes_entry.backlog import METRICS_URL_VARIABLE, BacklogWatch, PendingCount
from lanes_entry.candidate import CandidateWatch, Lease, state_file
from lanes_entry.config import BucketRoute, DegradeConfig, EntryConfig
from lanes_entry.dispatch import Dispatcher
from lanes_entry.errors import LaneError, Refusal
from lanes_entry.group import LaneInputs
from lanes_entry.metrics import (
    BATCHES,
    CANDIDATE,
    DEGRADED,
    REFUSALS,
    SWITCHES,
    TOKENISE_SECONDS,
    WAKEUPS,
    WARM,
    Publisher,
    Sample,
    Tally,
)
from lanes_entry.request import Question, read_question, shown
from lanes_entry.spans import Spans
from lanes_entry.tasks import answer_tensors, open_task
from lanes_entry.ticket import Ticket
from lanes_entry.tokenise import open_tokeniser
from lanes_entry.tracing import open_tracer, read_parent
from lanes_entry.trial import Answer, Arm, Asked, Trial
from lanes_entry.wakeup import WakeUp
from lanes_entry.warmup import FirstCalls

#: Names in pb_utils.TritonError, which the stub only fills in after this module is imported.
CODES = {
    "invalid": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "timeout": "UNAVAILABLE",
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
        self._instance = args["model_instance_name"]
        self._config = EntryConfig.from_model_config(args["model_config"])
        self._folder = Path(args["model_repository"])
        self._tokenise = open_tokeniser(self._tokenizer_file(self._version), self._config)
        self._spans = Spans(self._config.spans, self._name)
        self._task = open_task(self._config, self._tokenise)
        self._tally = Tally()
        self._backlog = self._backlog_watch()
        self._tracer = open_tracer(os.environ, self._log_tracer_error)
        self._dispatcher = Dispatcher(self._config, self._call_lane, self._tally, self._small_batch, self._tracer)
        identity = (self._name, str(self._version), self._instance)
        self._publisher = Publisher(_family, identity, self._config, self._tally, self._gauges, self._log_metrics_error)
        if self._backlog:
            self._backlog.start()
        self._wakeup: WakeUp | None = None
        if self._config.wake_after_ms > 0:
            self._wakeup = WakeUp(self._wake_queue, self._config.wake_after_ms / 1000, self._log_wakeup_error)
        self._first_calls = FirstCalls(
            self._config.buckets, self._first_call, self._count_warm, pb_utils.Logger.log_warn
        )
        self._candidate = CandidateWatch(
            state_file(self._folder, self._name),
            self._name,
            self._version,
            self._open_trial,
            self._log_candidate_error,
            self._publish_now,
        )
        self._begun = False
        # Triton runs the warm-up of the configuration in every process, before any other request.
        self._warm_up = bool(json.loads(args["model_config"]).get("model_warmup"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch: a response or None (answered later) per request, in order."""
        if not self._begun:
            # Not earlier: a call before the server has made the instance whole has brought it down (docs/queue.md).
            self._begun = True
            self._publisher.start()
            self._first_calls.start()
            self._candidate.start()
        if self._warm_up:
            self._warm_up = False
            if all(_is_empty(request) for request in requests):
                return [self._warm_answer(request) for request in requests]
        if self._wakeup:
            self._wakeup.busy()
        if self._backlog:
            self._backlog.busy()
        trial = self._candidate.trial
        try:
            if trial is not None:
                return self._answer_with_trial(trial, requests)
            return self._answer(requests)
        finally:
            if self._wakeup:
                self._wakeup.quiet()

    def _answer(self, requests: list[Any]) -> list[Any]:
        """What `execute` returns for these requests."""
        span = self._spans.now()
        began, began_ns = time.perf_counter(), time.time_ns()
        questions = [self._read(request) for request in requests]
        span = self._spans.add("decode", span, len(requests))
        tickets = self._tickets(requests, questions)
        self._tally.add_all(((BATCHES, 1), (TOKENISE_SECONDS, time.perf_counter() - began)))
        span = self._spans.add("tokenise", span, len(requests))
        if self._tracer:
            # Now: a trace is gone with its request, and late texts are sent after that.
            for request, ticket in zip(requests, tickets, strict=True):
                ticket.parent = read_parent(request.trace().get_context())
            parents = (ticket.parent for ticket in tickets)
            self._tracer.add("tokenise", parents, began_ns, time.time_ns(), {"requests": len(requests)})
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

    def finalize(self) -> None:
        """End the threads; Triton has no request of ours in flight any more."""
        self._first_calls.close()
        if self._wakeup:
            self._wakeup.close()
        if self._backlog:
            self._backlog.close()
        self._candidate.close()
        self._dispatcher.close()
        self._publisher.close()
        self._spans.close()
        if self._tracer:
            self._tracer.close()

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

    def _call_lane(self, route: BucketRoute, inputs: LaneInputs, version: int | None = None) -> Any:
        """One BLS call, pinned to a version, this one by default; FP32 [b, size] or [b, L, size]."""
        response = pb_utils.InferenceRequest(
            model_name=route.model,
            model_version=self._version if version is None else version,
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

    def _first_call(self, route: BucketRoute, version: int | None = None) -> None:
        """A full batch of one-token texts: the CPU engine trims it, the GPU engine and shared memory take all of it."""
        one = np.ones((route.batch, 1), dtype=np.int32)
        inputs = {"input_ids": np.zeros((route.batch, route.length), dtype=np.int32), "length": one}
        self._call_lane(route, inputs | {"segment_start": one} if self._config.segment else inputs, version)

    def _count_warm(self) -> None:
        self._tally.add(WARM, labels=(str(self._config.processes),))
        # `serve` waits for it before it says ready.
        self._publisher.hurry()

    def _tokenizer_file(self, version: int) -> Path:
        return self._folder / str(version) / "tokenizer.json"

    def _answer_with_trial(self, trial: Trial, requests: list[Any]) -> list[Any]:
        """As `_answer`, but for the requests that the trial takes, which are answered late."""
        began, taken = time.perf_counter(), list[tuple[Arm, Asked]]()
        own, late = [], []
        for request in requests:
            arm = trial.takes(request.request_id())
            asked = self._asked(request) if arm is not None else None
            late.append(asked is not None)
            if arm is None or asked is None:
                own.append(request)
            else:
                taken.append((arm, asked))
        trial.hand_over(taken, began)
        answers = iter(self._answer(own) if own else ())
        return [None if later else next(answers) for later in late]

    def _asked(self, request: Any) -> Asked | None:
        """What a trial keeps of a request, which is gone once `execute` has returned; None where it cannot be read."""
        try:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            second = pb_utils.get_input_tensor_by_name(request, "TEXT_PAIR")
            pairs = None if second is None else second.as_numpy()
            parent = read_parent(request.trace().get_context()) if self._tracer else None
            parameters, sender = request.parameters(), request.get_response_sender()
        except Exception:  # the usual way says why
            return None

        asking, gone = threading.Lock(), False

        def send(answer: Answer) -> None:
            nonlocal gone
            # With the answer the server frees what the sender points to: nobody may ask it any more, and the candidate
            # may still have the request when the served version has answered it.
            with asking:
                gone = True
            try:
                sender.send(self._response_of(answer), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:  # its client is gone; the others want their answers
                pb_utils.Logger.log_warn(f"{self._instance}: an answer could not be sent: {shown(error)}")

        def cancelled() -> bool:
            with asking:
                return gone or bool(sender.is_cancelled())

        return Asked(texts, pairs, parameters, cancelled, send, parent)

    def _open_trial(self, lease: Lease) -> Trial:
        """The trial of a lease, once each of its lanes has answered; raises where one does not."""
        config = EntryConfig.from_parameters(lease.entry, self._config.processes)
        for route in config.buckets:
            self._first_call(route, lease.version)
        # Each arm has a tokeniser of its own: the one of `execute` is its thread's alone.
        tokenise = open_tokeniser(self._tokenizer_file(lease.version), config)
        control = Arm(
            "control", self._config, open_tokeniser(self._tokenizer_file(self._version), self._config), self._dispatcher
        )
        call = partial(self._call_lane, version=lease.version)
        # A tally that nobody reads: what the entry tells of its lanes is of the served version.
        candidate = Arm("candidate", config, tokenise, Dispatcher(config, call, Tally(), tracer=self._tracer))
        return Trial(lease.version, lease.share, lease.deadline_s, candidate, control, self._tally)

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
        return self._response_of(tensors if ticket.refusal is None else ticket.refusal)

    def _response_of(self, answer: Answer) -> Any:
        if isinstance(answer, Refusal):
            self._tally.add(REFUSALS, labels=(answer.kind,))
            code = getattr(pb_utils.TritonError, CODES[answer.kind])
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(answer.message, code))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensor) for name, tensor in answer.items()])

    def _wake_queue(self) -> bool:
        """Send a request that has expired before any instance can take it; True when it was rejected for that."""
        self._tally.add(WAKEUPS)
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

    def _backlog_watch(self) -> BacklogWatch | None:
        degrade = self._config.degrade
        if degrade is None:
            return None
        read = PendingCount(self._metrics_url(degrade), self._name, self._version)
        return BacklogWatch(read, degrade, self._log_switch, self._log_backlog_error)

    @staticmethod
    def _metrics_url(degrade: DegradeConfig) -> str:
        """Where this server's own metrics are; whoever started it knows the port better than the settings do."""
        return os.environ.get(METRICS_URL_VARIABLE) or degrade.metrics_url

    def _small_batch(self) -> int | None:
        return self._backlog.batch if self._backlog else None

    def _gauges(self) -> list[Sample]:
        trial = self._candidate.trial
        return [
            *self._dispatcher.gauges(),
            (DEGRADED.name, (), float(self._small_batch() is not None)),
            (CANDIDATE.name, (), float(trial.version if trial else 0)),
        ]

    def _publish_now(self) -> None:
        """A gauge has changed while perhaps nothing is counted."""
        self._tally.wake()
        self._publisher.hurry()

    def _log_switch(self, small: bool, waiting: float) -> None:
        self._tally.add(SWITCHES, labels=("small" if small else "normal",))
        pb_utils.Logger.log_info(
            f"batches of {self._instance} are {'small' if small else 'normal again'}: {waiting:g} requests wait "
            "(entry.degrade)"
        )

    def _log_backlog_error(self, error: Exception) -> None:
        url = self._metrics_url(self._config.degrade) if self._config.degrade else ""
        pb_utils.Logger.log_warn(
            f"{self._instance} cannot read how many requests wait, so batches stay normal: "
            f"{type(error).__name__}: {shown(error)}; read from {url}; set entry.degrade.metrics_url to this server's "
            "metrics, or entry.degrade.enabled to false"
        )

    def _log_candidate_error(self, message: str) -> None:
        pb_utils.Logger.log_warn(f"{self._instance}: {json.dumps(message)}")

    def _log_tracer_error(self, message: str) -> None:
        pb_utils.Logger.log_warn(f"{self._instance}: {message}")

    def _log_metrics_error(self, error: Exception) -> None:
        pb_utils.Logger.log_warn(f"metrics of {self._instance} could not be told: {shown(error)}")


def _family(name: str, description: str, kind: str) -> Any:
    kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
    return pb_utils.MetricFamily(name=name, description=description, kind=kinds[kind])


def _is_empty(request: Any) -> bool:
    """Whether its texts are empty, as those of Triton's warm-up are."""
    return not any(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel().tolist())
