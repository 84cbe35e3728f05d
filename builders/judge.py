"""The accuracy gate of a deployment: its buckets, its tokeniser, its data, its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from builders.bucket import BucketPlan
from builders.graph import Recipe, make_graph, runner_of
from builders.manifest import Accuracy
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import DeploySettings
from builders.source import EncoderSource
from builders.verify.bisect import BisectReport, bisect
from builders.verify.data import Dataset, default_datasets, read_data, token_stream
from builders.verify.gate import FINE_WIDTHS, Gate, GateReport, GateSettings

if TYPE_CHECKING:
    import onnx_ir

#: Texts of each built-in data set; enough that one changed answer is below the line of 0.5 %.
TEXTS = 1000


def datasets(path: Path | None) -> tuple[Dataset, ...]:
    """The user's own file, or what is installed: labelled sets, else Python's documentation.

    Raises:
        VerifyError: the file cannot be read as data.
    """
    return default_datasets(TEXTS) if path is None else (read_data(path),)


def make_gate(
    settings: DeploySettings, plan: BucketPlan, tokenizer: Path, reference: onnx_ir.Model, data: Sequence[Dataset]
) -> Gate:
    """A gate against the exported FP32 graph.

    Args:
        settings: the deployment, for its objective.
        plan: its buckets.
        tokenizer: tokenizer.json as it is published.
        reference: the exported graph.
        data: what the task metrics are taken on.
    """
    tokenise = Tokeniser(tokenizer, plan.max_tokens)
    return Gate(
        runner_of(reference, "fp32"),
        GateSettings(
            buckets={bucket.length: bucket.batch for bucket in plan.buckets},
            stream=token_stream(tokenise),
            tokenise=tokenise,
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
        part = Recipe(recipe.target, tuple(step for step in recipe.fusions if step in steps), precision)
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
