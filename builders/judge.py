"""The accuracy gate of a deployment: its buckets, its tokeniser, its data, its line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builders.bucket import BucketPlan
from builders.calibration import Calibration, calibration
from builders.errors import PrecisionError
from builders.graph import Recipe, make_graph, runner_of
from builders.manifest import Accuracy
from builders.serving.entry.tokenise import Piece, Tokeniser
from builders.settings import DeploySettings
from builders.source import EncoderSource
from builders.tasks import TaskFacts
from builders.verify.bisect import BisectReport, bisect
from builders.verify.data import (
    Dataset,
    TextPairs,
    builtin_pairs,
    builtin_texts,
    default_datasets,
    first_words,
    read_data,
    shortened,
    token_stream,
    trec_questions,
    verse_pairs,
)
from builders.verify.gate import FINE_WIDTHS, Gate, GateReport, GateSettings
from builders.verify.metric import Text
from builders.verify.runner import VerifyError

if TYPE_CHECKING:
    import onnx_ir

#: Texts of each built-in data set; enough that one changed answer is below the line of 0.5 %.
TEXTS = 1000
#: Queries of a reranker, each run with several candidates.
QUERIES = 250


def datasets(path: Path | None, facts: TaskFacts | None = None) -> tuple[Dataset, ...]:
    """The user's own file, or what is there for the task: labelled sets where installed, else Python's documentation.

    Args:
        path: the user's file.
        facts: the model's task; None is an embedding.

    Raises:
        VerifyError: the file cannot be read as data.
    """
    if path is not None:
        return (read_data(path),)
    task = "embedding" if facts is None else facts.name
    if task == "embedding" or facts is None:
        return default_datasets(TEXTS)
    if task == "reranking":
        return (_ranking_pairs(),)
    if task == "answering":
        return (shortened(builtin_pairs(), TEXTS),)
    if task == "tagging":
        # Every token is judged, and 300 texts have thousands.
        return (shortened(builtin_texts(), 300),)
    labelled = _labels_of(facts)
    return (shortened(builtin_texts(), TEXTS), *labelled)


def _labels_of(facts: TaskFacts) -> tuple[Dataset, ...]:
    """TREC-6, for a classifier that has its labels."""
    try:
        found = trec_questions()
    except VerifyError:
        return ()
    return (shortened(found, TEXTS),) if set(found.labels) <= set(facts.labels) else ()


def _ranking_pairs() -> TextPairs:
    try:
        found = verse_pairs(QUERIES)
    except VerifyError:
        found = builtin_pairs()
        return TextPairs(found.name, found.queries[:QUERIES], found.positives[:QUERIES], made_up=True)
    queries = tuple(first_words(query, 16) for query in found.queries)
    return TextPairs(found.name, queries, found.positives, found.dropped)


def rows_of(tokenise: Tokeniser) -> Callable[[Sequence[Text]], list[Piece]]:
    """The entry's tokeniser as the gate calls it: texts or pairs, one row each, the end cut.

    Args:
        tokenise: made with `spans` for pairs, whose context is looked for.

    Raises:
        VerifyError: (the function) the first text of a pair leaves no room for the second.
    """

    def rows(texts: Sequence[Text]) -> list[Piece]:
        firsts = [text if isinstance(text, str) else text[0] for text in texts]
        seconds = [text[1] for text in texts if not isinstance(text, str)]
        try:
            return [tokens.pieces[0] for tokens in tokenise(firsts, seconds or None)]
        except ValueError as error:
            raise VerifyError(str(error), remedy="give shorter texts with --data, or longer buckets") from None

    return rows


def tokenise_for(plan: BucketPlan, tokenizer: Path, facts: TaskFacts | None) -> Callable[[Sequence[Text]], list[Piece]]:
    """The entry's tokeniser for a deployment's texts; see `rows_of`."""
    # With spans, every row of a pair says where its second text begins.
    pairs = facts is not None and facts.pair != "none"
    return rows_of(Tokeniser(tokenizer, plan.max_tokens, spans=pairs, segment=facts is not None and facts.segment))


def calibrated(
    recipe: Recipe, plan: BucketPlan, tokenizer: Path, facts: TaskFacts, texts: Calibration | None
) -> Recipe:
    """The recipe with its calibration texts as the lanes get them; without texts, as it is."""
    if texts is None:
        return recipe
    return replace(recipe, rows=tuple(texts.rows(tokenise_for(plan, tokenizer, facts))))


def calibration_of(precision: str, facts: TaskFacts, path: Path | None) -> Calibration | None:
    """What a precision is calibrated with; None for all but int8.

    Raises:
        VerifyError, PrecisionError: as `calibration`; a file that nothing would read is refused, too.
    """
    if precision == "int8":
        return calibration(path, pairs=facts.pair == "required")
    if path is not None:
        raise PrecisionError(
            "calibration texts without int8", value=precision, limit="engine.precision int8", remedy="leave it out"
        )
    return None


def make_gate(
    settings: DeploySettings,
    plan: BucketPlan,
    tokenizer: Path,
    reference: onnx_ir.Model,
    data: Sequence[Dataset],
    facts: TaskFacts | None = None,
) -> Gate:
    """A gate against the exported FP32 graph.

    Args:
        settings: the deployment, for its objective.
        plan: its buckets.
        tokenizer: tokenizer.json as it is published.
        reference: the exported graph.
        data: what the task metrics are taken on.
        facts: the model's task; None is an embedding.
    """
    tokenise = tokenise_for(plan, tokenizer, facts)
    return Gate(
        runner_of(reference, "fp32"),
        GateSettings(
            buckets={bucket.length: bucket.batch for bucket in plan.buckets},
            stream=token_stream(tokenise),
            tokenise=tokenise,
            facts=facts,
            datasets=tuple(data),
            accuracy_loss=settings.objectives.accuracy_loss,
            widths={length: batch for length, batch in FINE_WIDTHS.items() if length < plan.buckets[-1].length}
            | {bucket.length: bucket.batch for bucket in plan.buckets},
        ),
    )


def find_cause(
    reference: onnx_ir.Model, source: EncoderSource, recipe: Recipe, gate: Gate, longest: int
) -> BisectReport:
    """Which step of a recipe makes the gate fail, by halving."""

    def build(steps: Sequence[str]) -> tuple[onnx_ir.Model, Recipe]:
        precision = recipe.precision if recipe.precision in steps else "fp32"
        fusions = tuple(step for step in recipe.fusions if step in steps)
        part = replace(recipe, fusions=fusions, precision=precision)
        made = make_graph(reference, source, part, longest=longest, gate=None, progress=lambda _: None)
        return made.model, part

    def check(made: tuple[onnx_ir.Model, Recipe]) -> bool:
        model, part = made
        return gate.run(runner_of(model, part.precision), part.precision).passed

    return bisect(recipe.steps, build, check)


def accuracy_rows(report: GateReport) -> tuple[Accuracy, ...]:
    """The manifest's accuracy table."""
    return tuple(
        Accuracy(
            metric=f"{metric.task} on {metric.dataset}",
            reference=metric.reference,
            candidate=metric.candidate,
            loss=metric.loss,
            limit=metric.limit,
        )
        for metric in report.metrics
    )
