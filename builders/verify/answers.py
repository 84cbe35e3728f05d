"""The task metric of models that answer by themselves: labels, rankings, tags, spans.

Without labels of the user's, what is right is what the FP32 model answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from builders.verify.data import Dataset, LabelledTexts, TextPairs
from builders.verify.metric import Answer, Ask, MetricReport, Text
from builders.verify.runner import VerifyError

if TYPE_CHECKING:
    from builders.tasks import TaskFacts

#: Candidates that a query is ranked with, its own among them.
CANDIDATES = 4
#: Scores that differ by less than this share of the spread of all are in no order: rounding decides it.
_TELL_APART = 0.01
#: Longest span, tokens; the entry's own default.
_SPAN = 30

Decisions = NDArray[Any]
_Decide = Callable[[Sequence[Answer]], Decisions]


@dataclass(frozen=True)
class Question:
    """What is asked, and how answers become decisions that are right or wrong."""

    task: str
    """Name of the metric."""
    texts: tuple[Text, ...]
    decide: Callable[[Sequence[Answer]], _Decide]
    """Given the FP32 answers, the function that turns anybody's answers into decisions [n]."""
    right: Decisions | None = None
    """The right decisions [n] by the user's labels; None: those of FP32."""


class AnswerTask:
    """One metric on one data set, with what the reference answers, computed once for any number of candidates.

    Args:
        question: what is asked.
        name: of the data set.
        reference: asks the FP32 graph.
        limit: largest loss, share of 1.

    Raises:
        VerifyError: the reference's answers are not finite, or it gets nothing right.
    """

    def __init__(self, question: Question, name: str, reference: Ask, limit: float):
        """See the class."""
        self.task, self.name, self._texts, self._limit = question.task, name, question.texts, limit
        answers = reference(self._texts)
        if not _finite(answers):
            raise VerifyError("the reference's answers are not finite", value=name, remedy="use another model")
        self._decide = question.decide(answers)
        self._expected = self._decide(answers)
        self._right = self._expected if question.right is None else question.right
        if not len(self._expected):
            raise VerifyError(
                f"the FP32 model tells nothing apart on {name}", remedy="check the model, or give texts with --data"
            )
        self._reference = float((self._expected == self._right).mean())
        if self._reference == 0:
            raise VerifyError(f"the FP32 model gets nothing right on {name}", remedy="check the labels or pairs")

    def evaluate(self, candidate: Ask) -> MetricReport:
        """Judge a candidate; answers that are not finite fail with a metric of 0."""
        answers = candidate(self._texts)
        share, changed = 0.0, len(self._expected)
        if _finite(answers):
            decisions = self._decide(answers)
            share, changed = float((decisions == self._right).mean()), int((decisions != self._expected).sum())
        loss = (self._reference - share) / self._reference
        return MetricReport(
            self.task,
            self.name,
            len(self._expected),
            self._reference,
            share,
            loss,
            changed,
            self._limit,
            # In exact arithmetic 0.995 of 1000 answers is on the line and holds.
            loss <= self._limit + 1e-12,
        )


def answer_tasks(facts: TaskFacts, dataset: Dataset, reference: Ask, limit: float) -> tuple[AnswerTask, ...]:
    """The metrics of a model's task on a data set: accuracy where it has the user's labels, agreement with FP32 always.

    Args:
        facts: the model's task.
        dataset: labelled or plain texts (classification, tagging), pairs (reranking, answering, classification).
        reference: asks the FP32 graph.
        limit: largest loss, share of 1.

    Raises:
        VerifyError: the data does not fit the task, or the reference cannot be judged by it.
    """
    return tuple(AnswerTask(question, dataset.name, reference, limit) for question in questions(facts, dataset))


def questions(facts: TaskFacts, dataset: Dataset) -> Iterator[Question]:
    """What a model of this task is asked on a data set.

    Raises:
        VerifyError: the data does not fit the task.
    """
    if facts.name == "classification":
        yield from _classification(facts, dataset)
    elif facts.name == "tagging":
        yield Question("tag agreement with FP32", _texts(dataset), lambda _: _tags)
    elif not isinstance(dataset, TextPairs):
        raise VerifyError(
            f"the data does not fit a model of {facts.name}", value=dataset.name, limit="columns query,positive",
            remedy="give pairs with --data, or leave it out",
        )  # fmt: skip
    elif facts.name == "reranking":
        texts = tuple(_ranked(dataset))
        yield Question("ranking agreement with FP32", texts, _orders)
        if not dataset.made_up:
            right = np.zeros(len(dataset.queries), dtype=np.int64)
            yield Question("ranking recall@1", texts, lambda _: _first, right)
    else:
        yield Question("span agreement with FP32", _texts(dataset), lambda _: _spans)


def _classification(facts: TaskFacts, dataset: Dataset) -> Iterator[Question]:
    texts = _texts(dataset)
    if isinstance(dataset, LabelledTexts):
        if unknown := sorted(set(dataset.labels) - set(facts.labels)):
            raise VerifyError(
                f"{dataset.name} has labels that the model does not know", value=unknown[:5],
                limit=f"labels: {', '.join(facts.labels)}", remedy="write the model's labels, or set model.labels",
            )  # fmt: skip
        right = np.array([facts.labels.index(label) for label in dataset.labels])
        yield Question("classification accuracy", texts, lambda _: _top, right)
    if facts.activation == "sigmoid":
        yield Question("label agreement with FP32", texts, lambda _: _chosen)
    else:
        yield Question("top-1 agreement with FP32", texts, lambda _: _top)


def _texts(dataset: Dataset) -> tuple[Text, ...]:
    if isinstance(dataset, TextPairs):
        return tuple(zip(dataset.queries, dataset.positives, strict=True))
    return dataset.texts


def _ranked(dataset: TextPairs) -> Iterator[tuple[str, str]]:
    """Each query with its own positive first, then with those of others, always the same ones."""
    random, count = np.random.default_rng(0), len(dataset.queries)
    rivals = min(CANDIDATES - 1, count - 1)
    for place, query in enumerate(dataset.queries):
        others = (place + 1 + random.permutation(count - 1)[:rivals]) % count
        for other in (place, *others):
            yield query, dataset.positives[other]


def _scores(answers: Sequence[Answer]) -> NDArray[np.float64]:
    """Score of the last label of each text, FP64 [n]: the only one of a reranker."""
    return np.array([answer.output[-1] for answer in answers], dtype=np.float64)


def _orders(reference: Sequence[Answer]) -> _Decide:
    """Which of two candidates comes first, for each two of a query that FP32 tells apart."""
    size = _group_size(reference)
    found = _scores(reference).reshape(-1, size)
    rows, columns = np.triu_indices(size, 1)
    apart = np.abs(found[:, rows] - found[:, columns]) > _TELL_APART * found.std()

    def decide(answers: Sequence[Answer]) -> Decisions:
        scores = _scores(answers).reshape(-1, size)
        order: Decisions = np.sign(scores[:, rows] - scores[:, columns])[apart]
        return order

    return decide


def _group_size(answers: Sequence[Answer]) -> int:
    """Candidates of a query: the texts up to the next query."""
    first = answers[0].text
    return next((place for place, answer in enumerate(answers) if answer.text[0] != first[0]), len(answers))


def _first(answers: Sequence[Answer]) -> Decisions:
    """Place of each query's best candidate, INT64 [queries]."""
    place: Decisions = _scores(answers).reshape(-1, _group_size(answers)).argmax(1)
    return place


def _top(answers: Sequence[Answer]) -> Decisions:
    return np.array([int(answer.output.argmax()) for answer in answers])


def _chosen(answers: Sequence[Answer]) -> Decisions:
    """All labels of a half and more, as one string a text."""
    return np.array(["".join("01"[int(score >= 0.5)] for score in answer.output) for answer in answers])


def _tags(answers: Sequence[Answer]) -> Decisions:
    """The label of every token of all texts."""
    return np.concatenate([answer.output.argmax(-1) for answer in answers])


def _spans(answers: Sequence[Answer]) -> Decisions:
    """Start and end of the best span of each context, as one number."""
    return np.array([_span(answer) for answer in answers])


def _span(answer: Answer) -> int:
    # The special token at the end is no answer.
    context = answer.output[answer.lead : -1].astype(np.float64)
    if not len(context):
        return -1
    total = context[:, 0][:, None] + context[:, 1][None]
    allowed = np.triu(np.ones(total.shape, dtype=bool)) & ~np.triu(np.ones(total.shape, dtype=bool), _SPAN)
    start, end = divmod(int(np.where(allowed, total, -np.inf).argmax()), len(context))
    return 100_000 * start + end


def _finite(answers: Sequence[Answer]) -> bool:
    return all(np.isfinite(answer.output).all() for answer in answers)
