"""The gate of models that answer by themselves: a sound graph passes, a planted fault fails, in every task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from builders.export import export_onnx
from builders.graph import make_graph, recipe_for, runner_of
from builders.graph_file import load_graph
from builders.judge import datasets, rows_of
from builders.samples import FIRST_WORD, WORDS, write_sample
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tasks import Task
from builders.verify.answers import AnswerTask, answer_tasks, questions
from builders.verify.data import Dataset, LabelledTexts, PlainTexts, TextPairs
from builders.verify.gate import Gate, GateReport, GateSettings, require
from builders.verify.metric import Answer
from builders.verify.parity import ParityCase, parity_cases
from builders.verify.runner import VerifyError
from tests.verify.graphs import Edit, array_of, edited, set_array, swap_q_and_k

LIMIT, BUCKETS = 40, {16: 8, 40: 4}


def words(count: int, length: int, seed: int) -> tuple[str, ...]:
    """Different texts of 3 words and more."""
    random = np.random.default_rng(seed)
    rows = (random.integers(FIRST_WORD, WORDS, random.integers(3, length)) for _ in range(count))
    return tuple(dict.fromkeys(" ".join(f"w{number}" for number in row) for row in rows))


TEXTS = words(400, 14, 0)
PAIRS = TextPairs("word pairs", words(60, 6, 1), words(60, 20, 2))
PLAIN = PlainTexts("words", TEXTS)


@dataclass(frozen=True)
class Judged:
    """A random model of a task and a gate around its exported graph."""

    source: EncoderSource
    reference: onnx_ir.Model
    gate: Gate
    settings: GateSettings

    def check(self, *edits: Edit) -> GateReport:
        return self.gate.run(runner_of(edited(self.reference, *edits), "fp32"), "fp32")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Task], Judged]:
    made: dict[Task, Judged] = {}

    def judge(task: Task) -> Judged:
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            write_sample(folder, "bert", task, positions=LIMIT, seed=3)
            source = open_source(ModelSettings(source=str(folder)))
            reference = load_graph(export_onnx(source, folder / "model.onnx").path)
            facts = source.task
            tokenise = Tokeniser(folder / "tokenizer.json", LIMIT, spans=facts.pair != "none", segment=facts.segment)
            settings = GateSettings(
                buckets=BUCKETS,
                stream=np.random.default_rng(3).integers(FIRST_WORD, WORDS, 2000).astype(np.int32),
                tokenise=rows_of(tokenise),
                facts=facts,
                datasets=(PAIRS if task in ("reranking", "answering") else PLAIN,),
            )
            made[task] = Judged(source, reference, Gate(runner_of(reference, "fp32"), settings), settings)
        return made[task]

    return judge


METRICS: dict[Task, list[str]] = {
    "classification": ["top-1 agreement with FP32"],
    "reranking": ["ranking agreement with FP32", "ranking recall@1"],
    "tagging": ["tag agreement with FP32"],
    "answering": ["span agreement with FP32"],
}
OUTPUTS: dict[Task, str] = {"classification": "SCORES", "reranking": "SCORES", "tagging": "TAGS", "answering": "SPANS"}


@pytest.mark.parametrize("task", METRICS)
def test_fused_graph_passes_every_part_when_it_is_sound(task: Task, judged: Callable[[Task], Judged]) -> None:
    case = judged(task)
    recipe = recipe_for("onnxruntime", "fp32")
    made = make_graph(case.reference, case.source, recipe, longest=LIMIT, gate=case.gate, progress=lambda _: None)
    report = require(case.gate.run(runner_of(made.model, "fp32"), "fp32"), task)
    assert [metric.task for metric in report.metrics] == METRICS[task]
    assert [metric.loss for metric in report.metrics] == [0.0] * len(report.metrics)
    output = next(block for block in report.parity.blocks if block.name == OUTPUTS[task])
    assert output.score_error is not None
    assert output.score_error < 1e-4


@pytest.mark.parametrize("task", METRICS)
def test_parity_and_metric_fail_when_q_and_k_are_swapped(task: Task, judged: Callable[[Task], Judged]) -> None:
    report = judged(task).check(swap_q_and_k)
    assert not report.passed
    assert not report.parity.passed
    failed = {metric.task for metric in report.metrics if not metric.passed}
    assert METRICS[task][0] in failed, report.reasons


def turn_head(model: onnx_ir.Model) -> None:
    """The head's outputs in the wrong order, one place on: what a mixed up label list does."""
    weights = [v for v in model.graph.initializers.values() if v.const_value is not None and 3 in v.const_value.shape]
    head = [v for v in weights if array_of(v).dtype == np.float32]
    assert head
    for value in head:
        array = array_of(value)
        set_array(value, np.roll(array, 1, axis=array.shape.index(3)))


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_output_alone_fails_when_its_labels_are_mixed_up(task: Task, judged: Callable[[Task], Judged]) -> None:
    report = judged(task).check(turn_head)
    assert [block.name for block in report.parity.blocks if not block.passed] == [OUTPUTS[task]]
    assert "scores off by" in report.parity.summary()
    assert not report.metrics[0].passed


def ignore_segments(model: onnx_ir.Model) -> None:
    """Every token is of the first text, whatever the request says."""
    inputs = {value.name: value for value in model.graph.inputs}
    for use in list(inputs["segment_start"].uses()):
        use.node.replace_input_with(use.idx, inputs["length"])


@pytest.mark.parametrize("task", ["reranking", "answering"])
def test_pairs_alone_fail_when_the_graph_ignores_their_segments(task: Task, judged: Callable[[Task], Judged]) -> None:
    report = judged(task).check(ignore_segments)
    below = report.parity.first_below
    assert below is not None
    assert below.where.endswith("pairs")
    assert not report.passed


def spoil_bucket(model: onnx_ir.Model) -> None:
    """Positions past the short bucket are those of its last token: the long bucket alone is wrong."""
    table = next(
        value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and "position_embeddings" in name and value.const_value.shape[0] == LIMIT
    )
    array = array_of(table).copy()
    array[16:] = array[15]
    set_array(table, array)


def test_tokens_of_the_long_bucket_fail_when_only_its_positions_are_wrong(judged: Callable[[Task], Judged]) -> None:
    report = judged("tagging").check(spoil_bucket)
    output = next(block for block in report.parity.blocks if block.name == "TAGS")
    assert not output.passed
    assert output.where.startswith("bucket 40")


def overflow(model: onnx_ir.Model) -> None:
    for value in model.graph.initializers.values():
        if value.const_value is not None and "classifier.bias" in str(value.name):
            set_array(value, np.full(array_of(value).shape, np.nan, np.float32))


def test_answers_are_worth_nothing_when_they_are_not_finite(judged: Callable[[Task], Judged]) -> None:
    report = judged("classification").check(overflow)
    assert (report.finite, report.metrics[0].candidate, report.metrics[0].loss) == (False, 0.0, 1.0)
    assert "not finite" in report.parity.summary()


# What is right by the user's labels.


def labelled(share: float) -> LabelledTexts:
    """Labels of the model itself (see `fixed`), this share of them wrong."""
    names = tuple(f"LABEL_{(number + (number % 100 < 100 * share)) % 3}" for number in range(len(TEXTS)))
    return LabelledTexts("labelled", TEXTS, names)


def fixed(wrong: int = 0) -> Callable[[object], list[Answer]]:
    """Answers label n % 3 to text n; the first `wrong` texts get the next label."""

    def ask(texts: object) -> list[Answer]:
        assert isinstance(texts, tuple)
        rows = [(number + (number < wrong)) % 3 for number in range(len(texts))]
        return [Answer(text, np.eye(3, dtype=np.float32)[row], 0) for text, row in zip(texts, rows, strict=True)]

    return ask


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (1, True), (3, False)])
def test_accuracy_is_lost_when_answers_move_away_from_the_users_labels(
    wrong: int, passes: bool, judged: Callable[[Task], Judged]
) -> None:
    facts = judged("classification").source.task
    accuracy, agreement = answer_tasks(facts, labelled(0.0), fixed(), 0.005)
    found = accuracy.evaluate(fixed(wrong))
    assert (found.task, found.count, found.reference) == ("classification accuracy", len(TEXTS), 1.0)
    assert (found.passed, found.changed) == (passes, wrong)
    assert agreement.evaluate(fixed(wrong)).passed is passes


def test_accuracy_is_kept_when_answers_move_towards_the_users_labels(judged: Callable[[Task], Judged]) -> None:
    facts = judged("classification").source.task
    accuracy, agreement = answer_tasks(facts, labelled(0.05), fixed(), 0.005)
    better = accuracy.evaluate(fixed(5))
    assert better.reference == pytest.approx(0.95, abs=0.01)
    assert better.loss < 0
    assert better.passed
    assert not agreement.evaluate(fixed(5)).passed


def test_refused_when_labels_or_columns_are_not_the_models(judged: Callable[[Task], Judged]) -> None:
    other: Dataset = LabelledTexts("mine", TEXTS[:40], ("good", "bad") * 20)
    with pytest.raises(VerifyError, match=r"labels that the model does not know.*bad.*LABEL_0, LABEL_1, LABEL_2"):
        list(questions(judged("classification").source.task, other))
    with pytest.raises(VerifyError, match=r"does not fit a model of reranking.*query,positive"):
        list(questions(judged("reranking").source.task, PLAIN))


def test_every_label_counts_when_there_may_be_several(judged: Callable[[Task], Judged]) -> None:
    facts = replace(judged("classification").source.task, activation="sigmoid")
    (question,) = questions(facts, PLAIN)
    assert question.task == "label agreement with FP32"

    def ask(second: float) -> Callable[[object], list[Answer]]:
        return lambda texts: [Answer(text, np.array([0.9, second, 0.1], np.float32), 0) for text in TEXTS]

    task = AnswerTask(question, "words", ask(0.6), 0.005)
    assert task.evaluate(ask(0.55)).passed
    assert task.evaluate(ask(0.4)).changed == len(TEXTS)  # the first label is still the best


def test_order_is_judged_only_where_fp32_tells_candidates_apart(judged: Callable[[Task], Judged]) -> None:
    facts = judged("reranking").source.task
    order = next(iter(questions(facts, PAIRS)))

    def ask(scores: tuple[float, ...]) -> Callable[[object], list[Answer]]:
        rows = np.array(scores * len(PAIRS.queries), dtype=np.float32)
        return lambda _: [Answer(text, rows[[n]], 0) for n, text in enumerate(order.texts)]

    task = AnswerTask(order, "pairs", ask((0.9, 0.5, 0.5, 0.1)), 0.005)
    same = task.evaluate(ask((0.9, 0.49, 0.51, 0.1)))
    assert (same.count, same.passed) == (5 * len(PAIRS.queries), True)
    turned = task.evaluate(ask((0.9, 0.05, 0.51, 0.1)))
    assert (turned.changed, turned.passed) == (len(PAIRS.queries), False)


def test_span_ends_within_thirty_tokens_of_its_start_when_logits_are_far_apart(
    judged: Callable[[Task], Judged],
) -> None:
    (question,) = questions(judged("answering").source.task, PAIRS)
    output = np.zeros((60, 2), np.float32)
    output[12, 0], output[55, 1], output[20, 1], output[3] = 5, 7, 3, 50
    decide = question.decide([])
    # 3 is of the question (before `lead`), 55 too far from 12, so 12 to 20 it is: places 2 and 10 of the context.
    assert decide([Answer(("a", "b"), output, 10)]).tolist() == [200_010]


def test_pair_cases_cover_every_bucket_when_the_model_takes_segments() -> None:
    cases = parity_cases({8: 4, 16: 4}, segments=True)
    assert {case.bucket for case in cases if case.paired} == {8, 16}
    assert {case.bucket for case in cases if not case.paired} == {8, 16}
    assert all(case.segments is not None for case in cases)
    starts = ParityCase(8, (8, 1), (2, 0)).segment_start
    assert starts is not None
    assert starts.tolist() == [[2], [0]]
    assert "pairs" in str(ParityCase(8, (8, 1), (2, 0)))


def test_data_of_the_task_is_there_when_the_user_gives_none(
    judged: Callable[[Task], Judged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for task in METRICS:
        (data,) = datasets(None, judged(task).source.task)
        assert isinstance(data, TextPairs if task in ("reranking", "answering") else PlainTexts), task
        assert list(questions(judged(task).source.task, data)), task
    assert [question.task for question in questions(judged("reranking").source.task, data)] == METRICS["reranking"][:1]
