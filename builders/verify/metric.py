"""What the accuracy loss means to a user: a task's metric with the candidate's vectors against the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.verify.data import Dataset, LabelledTexts, PlainTexts, TextPairs
from builders.verify.runner import Floats, Ids, Runner, VerifyError, ask, output_of

Text = str | tuple[str, str]
"""A text, or a pair of texts."""
Embed = Callable[[Sequence[str]], Floats]
"""Texts to FP32 [n, dim]."""
LEAST_NEIGHBOURS = 1000
"""Texts that top-1 agreement is judged on at least: at 99.5 % of fewer, one text decides too much."""
_BLOCK = 2048


@dataclass(frozen=True)
class Answer:
    """What a model said to one text or pair."""

    text: Text
    output: Floats
    """[size], or [tokens, size] of a model with a row for each token."""
    lead: int
    """First token of the second text, without the special tokens before it; 0 of a single text."""


Ask = Callable[[Sequence[Text]], list[Answer]]


@dataclass(frozen=True)
class MetricReport:
    """One task on one data set."""

    task: str
    """Name of the metric: `classification accuracy`, `retrieval recall@1`, `top-1 neighbour agreement`, or one of
    `builders.verify.answers`."""
    dataset: str
    count: int
    """Texts or pairs judged (of a labelled set, the part that was not trained on)."""
    reference: float
    """The metric with the FP32 vectors, share of 1."""
    candidate: float
    """The metric with the candidate's vectors, share of 1; 0 where they are not finite."""
    loss: float
    """(reference - candidate) / reference, share of 1; below 0 the candidate is better."""
    changed: int
    """Answers that differ from the reference's, right or wrong; the loss is their balance."""
    limit: float
    """Largest loss, share of 1 (objectives.accuracy_loss)."""
    passed: bool

    def summary(self) -> str:
        """One line: verdict, both figures, loss, limit."""
        return (
            f"{self.task} on {self.dataset} {'holds' if self.passed else 'fails'}: {self.candidate:.4f} against "
            f"{self.reference:.4f} in FP32, loss {self.loss:.3%}, limit {self.limit:.3%} "
            f"({self.count} judged, {self.changed} changed)"
        )


class TextEncoder:
    """Texts to vectors or other answers through a runner, padded as the lanes pad.

    Args:
        runner: the graph or engine.
        tokenise: texts, or pairs, to objects with `ids` INT32 [length], for a pair with `segment_start` and `lead` too
            (`builders.serving.entry.tokenise.Piece`); must cut at the longest width.
        widths: padded length -> largest batch. For an engine the buckets of its profiles; a graph with a free L runs
            short texts faster with finer steps.
    """

    def __init__(self, runner: Runner, tokenise: Callable[[Sequence[Any]], Sequence[Any]], widths: Mapping[int, int]):
        """See the class."""
        self._runner, self._tokenise, self._widths = runner, tokenise, dict(sorted(widths.items()))

    def __call__(self, texts: Sequence[str]) -> Floats:
        """FP32 [n, dim], in the order of the texts; see `answers`."""
        return np.stack([answer.output for answer in self.answers(texts)])

    def answers(self, texts: Sequence[Text]) -> list[Answer]:
        """One answer for each text, in their order.

        Raises:
            VerifyError: a text is longer than the longest width, or the runner fails.
        """
        tokens = self._tokenise(texts)
        rows = [token.ids for token in tokens]
        pairs = bool(texts) and isinstance(texts[0], tuple)
        groups: dict[int, list[int]] = {width: [] for width in self._widths}
        for place in sorted(range(len(rows)), key=lambda place: len(rows[place])):
            width = next((width for width in groups if len(rows[place]) <= width), None)
            if width is None:
                raise VerifyError(
                    "a text is longer than the longest width",
                    value=len(rows[place]),
                    limit=f"{max(groups)} tokens",
                    remedy="let the tokeniser cut there",
                )
            groups[width].append(place)
        found: dict[int, Floats] = {}
        for width, places in groups.items():
            most = self._widths[width]
            for first in range(0, len(places), most):
                batch = places[first : first + most]
                segment = np.array([[tokens[place].segment_start] for place in batch], np.int32) if pairs else None
                answer = self._run([rows[place] for place in batch], width, segment)
                found |= dict(zip(batch, answer, strict=True))
        # A row for each token: those of the padding are no answer.
        per_token = bool(found) and found[0].ndim == 2
        return [
            Answer(
                text,
                found[place][: len(rows[place])] if per_token else found[place],
                int(tokens[place].lead) if pairs else 0,
            )
            for place, text in enumerate(texts)
        ]

    def _run(self, rows: Sequence[NDArray[np.int32]], width: int, segment: Ids | None) -> Floats:
        ids = np.zeros((len(rows), width), dtype=np.int32)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        length = np.array([[len(row)] for row in rows], dtype=np.int32)
        answer = ask(self._runner, ids, length, segment)
        output = output_of(answer)
        if output is None:
            raise VerifyError("the runner returns no output", value=[*answer], remedy="name the output so")
        return answer[output]


class Task:
    """A data set with everything that the reference decides, computed once for any number of candidates.

    Args:
        dataset: labelled texts (a logistic regression is trained on the reference's vectors), pairs or plain texts.
        reference: embeds with the FP32 graph.
        limit: largest loss, share of 1.

    Raises:
        VerifyError: too few plain texts, vectors that are not finite, or scikit-learn is missing for labels.
    """

    def __init__(self, dataset: Dataset, reference: Embed, limit: float):
        """See the class."""
        self.dataset, self.name, self.limit = dataset, dataset.name, limit
        if isinstance(dataset, PlainTexts) and len(dataset.texts) < LEAST_NEIGHBOURS:
            raise VerifyError(
                f"too few different texts in {dataset.name}",
                value=len(dataset.texts),
                limit=f"{LEAST_NEIGHBOURS}",
                remedy="add texts, or labels",
            )
        self._judge, self._texts, self.task = _judge(dataset, reference)
        vectors = reference(self._texts)
        if not np.isfinite(vectors).all():
            raise VerifyError("the reference's vectors are not finite", value=dataset.name, remedy="use another model")
        self._expected, self._right = self._judge(vectors)

    def evaluate(self, candidate: Embed) -> MetricReport:
        """Judge a candidate; vectors that are not finite fail with a metric of 0."""
        vectors = candidate(self._texts)
        reference = float(self._right.mean())
        if reference == 0:
            raise VerifyError(
                f"the FP32 model gets nothing right on {self.dataset.name}", remedy="check the labels or pairs"
            )
        if np.isfinite(vectors).all():
            answers, right = self._judge(vectors)
            if isinstance(self.dataset, PlainTexts):  # nothing is right in itself: the reference's neighbour is
                right = answers == self._expected
            share, changed = float(right.mean()), int((answers != self._expected).sum())
        else:
            share, changed = 0.0, len(self._expected)
        loss = (reference - share) / reference
        return MetricReport(
            self.task,
            self.dataset.name,
            len(self._expected),
            reference,
            share,
            loss,
            changed,
            self.limit,
            # In exact arithmetic 0.995 of 1000 texts is on the line and holds.
            loss <= self.limit + 1e-12,
        )


_Answers = NDArray[Any]
_Judge = Callable[[Floats], tuple[_Answers, NDArray[np.bool_]]]


def _judge(dataset: Dataset, reference: Embed) -> tuple[_Judge, tuple[str, ...], str]:
    """What turns vectors of the returned texts into answers [n] and right [n]; and the task's name."""
    if isinstance(dataset, LabelledTexts):
        return (*_classifier(dataset, reference), "classification accuracy")
    if isinstance(dataset, TextPairs):
        return (*_retrieval(dataset), "retrieval recall@1")
    return _neighbours, dataset.texts, "top-1 neighbour agreement"


def _classifier(dataset: LabelledTexts, reference: Embed) -> tuple[_Judge, tuple[str, ...]]:
    """Logistic regression on frozen FP32 vectors of 4/5 of the texts; the other fifth is judged."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise VerifyError("scikit-learn is not installed", remedy="pip install 'encoder-lanes[build]'") from None
    labels = np.array(dataset.labels)
    size = max(len(set(dataset.labels)), round(len(labels) / 5))
    train, test = train_test_split(np.arange(len(labels)), test_size=size, random_state=0, stratify=labels)
    model = LogisticRegression(max_iter=1000)
    model.fit(reference([dataset.texts[place] for place in train]), labels[train])

    def judge(vectors: Floats) -> tuple[_Answers, NDArray[np.bool_]]:
        answers = model.predict(vectors)
        return answers, answers == labels[test]

    return judge, tuple(dataset.texts[place] for place in test)


def _retrieval(dataset: TextPairs) -> tuple[_Judge, tuple[str, ...]]:
    """Each query against every different positive."""
    positives = list(dict.fromkeys(dataset.positives))
    place = {text: number for number, text in enumerate(positives)}
    expected = np.array([place[text] for text in dataset.positives])
    count = len(dataset.queries)

    def judge(vectors: Floats) -> tuple[_Answers, NDArray[np.bool_]]:
        answers = _nearest(vectors[:count], vectors[count:])
        return answers, answers == expected

    return judge, (*dataset.queries, *positives)


def _neighbours(vectors: Floats) -> tuple[_Answers, NDArray[np.bool_]]:
    answers = _nearest(vectors, vectors, itself=False)
    return answers, np.ones(len(answers), dtype=np.bool_)


def _nearest(queries: Floats, keys: Floats, *, itself: bool = True) -> NDArray[np.int64]:
    """Place of the key with the largest cosine, INT64 [queries]; `itself=False` leaves out the query's own place."""
    a, b = _unit(queries), _unit(keys)
    answers = []
    for first in range(0, len(a), _BLOCK):
        scores = a[first : first + _BLOCK] @ b.T
        if not itself:
            rows = np.arange(len(scores))
            scores[rows, first + rows] = -np.inf
        answers.append(scores.argmax(axis=1))
    return np.concatenate(answers)


def _unit(vectors: Floats) -> Floats:
    unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit
