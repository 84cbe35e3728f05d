"""The accuracy gate: a candidate that fails it is not published."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter

from builders.errors import BuilderError
from builders.verify.answers import AnswerTask, answer_tasks
from builders.verify.data import Dataset
from builders.verify.metric import MetricReport, Task, TextEncoder
from builders.verify.parity import LINES, ParityCase, ParityLine, ParityReport, compare, parity_cases
from builders.verify.runner import CachedRunner, Ids, Runner, VerifyError

if TYPE_CHECKING:
    from builders.tasks import TaskFacts

Scope = Literal["step", "full"]
Model = TypeVar("Model")


class GateError(BuilderError):
    """A candidate fails the accuracy gate; `report` says where."""

    def __init__(self, report: GateReport, name: str):
        """Take the reasons of a failed report; `name` is the step or build that was judged."""
        super().__init__(
            f"{name} fails the accuracy gate: {'; '.join(report.reasons)}",
            remedy="leave the step out (--skip), choose a wider precision, or find the step with `verify --bisect`",
        )
        self.report = report


@dataclass(frozen=True)
class GateReport:
    """What the gate saw; `to_json` and `from_json` keep every figure."""

    precision: str
    scope: Scope
    """`step`: parity of a few batches, between two steps; `full`: all buckets and the task metrics."""
    parity: ParityReport
    metrics: tuple[MetricReport, ...]
    finite: bool
    """Every value of every compared output, padding and rows of length 0 included."""
    reasons: tuple[str, ...]
    """Why it failed; empty when it passed."""
    seconds: float
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """As plain dictionaries, lists, strings and finite numbers."""
        found: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GateReport:
        """The inverse of `to_json`.

        Raises:
            pydantic.ValidationError: the document is of another form.
        """
        return _ADAPTER.validate_python(document)


_ADAPTER = TypeAdapter(GateReport)


@dataclass(frozen=True)
class GateSettings:
    """What a gate judges with."""

    buckets: Mapping[int, int]
    """Bucket length, tokens -> largest batch, texts."""
    stream: Ids
    """INT32 [n], tokens of real texts that parity's batches are filled with (`data.token_stream`)."""
    tokenise: Callable[[Sequence[Any]], Sequence[Any]]
    """Texts to objects with `ids`, cut at the longest bucket (`builders.serving.entry.tokenise.Tokeniser`); pairs to
    objects with `segment_start` besides."""
    facts: TaskFacts | None = None
    """The model's task; None is an embedding."""
    datasets: tuple[Dataset, ...] = ()
    """What the task metric is taken on; none leaves it out."""
    accuracy_loss: float = 0.005
    """Largest loss of a task metric, share of 1 (`objectives.accuracy_loss`)."""
    batches: tuple[int, ...] = (2, 5)
    """Batch sizes of the mixed batches, besides 1 and each bucket's largest."""
    max_tokens: int = 4096
    """Largest mixed batch of parity, padded tokens; 4096 keeps a CPU short, an engine takes all it is built for."""
    lines: Mapping[str, ParityLine] = field(default_factory=lambda: LINES)
    """Parity lines by precision."""
    widths: Mapping[int, int] | None = None
    """Padded length -> batch of the metric's runs; `buckets` when left out, which is all an engine takes. A graph
    runs short texts several times faster with `FINE_WIDTHS`."""


FINE_WIDTHS: Mapping[int, int] = {16: 64, 24: 64, 32: 64, 48: 32, 64: 32, 128: 16, 256: 8, 512: 4, 1024: 2, 2048: 1}
"""Widths for graphs whose L is free; texts above 2048 tokens need an own mapping."""


class Gate:
    """Judges candidates against one reference, whose own answers are computed once.

    Args:
        reference: the FP32 graph with its block outputs.
        settings: what to judge with.
    """

    def __init__(self, reference: Runner, settings: GateSettings):
        """See the class."""
        self._reference, self._settings = CachedRunner(reference), settings

    def check_step(self, name: str, candidate: Runner, precision: str = "fp32") -> GateReport:
        """Gate one step of a build as it is applied: parity in the shortest bucket, so seconds and not minutes.

        Raises:
            GateError: the step broke the graph.
        """
        shortest = min(self._settings.buckets)
        buckets = {shortest: min(5, self._settings.buckets[shortest])}
        cases = parity_cases(buckets, batches=(2, 5), segments=self._segments)
        return require(self._report(candidate, precision, "step", cases, ()), f"step {name}")

    def run(self, candidate: Runner, precision: str) -> GateReport:
        """The whole gate: parity in all buckets, every task metric; the caller decides about a failure (`require`).

        Raises:
            VerifyError: the reference cannot be run or judged, or the candidate is of another model.
        """
        settings = self._settings
        cases = parity_cases(
            settings.buckets, batches=settings.batches, max_tokens=settings.max_tokens, segments=self._segments
        )
        return self._report(candidate, precision, "full", cases, self._tasks)

    @property
    def _segments(self) -> bool:
        facts = self._settings.facts
        return facts is not None and facts.segment

    @cached_property
    def _tasks(self) -> tuple[Task | AnswerTask, ...]:
        settings, texts = self._settings, self._texts(self._reference)
        if settings.facts is None or settings.facts.name == "embedding":
            return tuple(Task(dataset, texts, settings.accuracy_loss) for dataset in settings.datasets)
        found = (
            answer_tasks(settings.facts, data, texts.answers, settings.accuracy_loss) for data in settings.datasets
        )
        return tuple(task for tasks in found for task in tasks)

    def _texts(self, runner: Runner) -> TextEncoder:
        return TextEncoder(runner, self._settings.tokenise, self._settings.widths or self._settings.buckets)

    def _report(
        self,
        candidate: Runner,
        precision: str,
        scope: Scope,
        cases: Sequence[ParityCase],
        tasks: Sequence[Task | AnswerTask],
    ) -> GateReport:
        began = time.perf_counter()
        line = self._settings.lines.get(precision)
        if line is None:
            raise VerifyError("no parity line for this precision", value=precision, limit=str([*self._settings.lines]))
        parity = compare(self._reference, candidate, cases, self._settings.stream, line)
        reasons = [] if parity.passed else [parity.summary()]
        loose = [block for block in parity.blocks if not block.finite]
        if loose:
            reasons.append(f"not finite: {', '.join(block.name for block in loose[:5])} ({loose[0].where})")
        metrics: list[MetricReport] = []
        # A candidate that cannot run a bucket cannot be judged by texts either.
        for task in () if parity.failures else tasks:
            try:
                texts = self._texts(candidate)
                if isinstance(task, Task):
                    metrics.append(task.evaluate(texts))
                else:
                    metrics.append(task.evaluate(texts.answers))
            except VerifyError as error:
                reasons.append(f"{task.task} on {task.name}: {error}")
        reasons += [metric.summary() for metric in metrics if not metric.passed]
        return GateReport(
            precision,
            scope,
            parity,
            tuple(metrics),
            not loose and not parity.failures,
            tuple(reasons),
            time.perf_counter() - began,
            not reasons,
        )


def run_gate(reference: Runner, candidate: Runner, settings: GateSettings, precision: str) -> GateReport:
    """Judge one candidate; see `Gate.run`."""
    return Gate(reference, settings).run(candidate, precision)


def step_gate(gate: Gate, show: Callable[[Model], Runner]) -> Callable[[Model, Model, str], None]:
    """The form that `builders.fuse` calls after each step: graph before, graph after, the step's name.

    Args:
        gate: what judges.
        show: makes a runner of a graph, with its block outputs where they can be named.

    Returns:
        A function that raises `GateError`, with the step's name, on the graph after a bad step.
    """

    def check(_: Model, after: Model, name: str) -> None:
        gate.check_step(name, show(after))

    return check


def require(report: GateReport, name: str) -> GateReport:
    """Return a report that passed.

    Raises:
        GateError: it did not; carries the report.
    """
    if not report.passed:
        raise GateError(report, name)
    return report
