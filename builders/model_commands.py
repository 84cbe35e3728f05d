"""The commands `check` and `matrix`: what a model is, and which kinds of models hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from builders.command_options import ModelName, chosen_models, say
from builders.errors import BuilderError

if TYPE_CHECKING:
    from builders.check import ModelCheck
    from builders.matrix import Row

Given = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A folder, package:NAME/PATH or hub:ORG/NAME; default: those of the settings."
    ),
]
OwnConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file: its models, or with MODEL its buckets, lanes and engine."),
]
Export = Annotated[
    bool, typer.Option("--export", help="Export and fuse it for real and time it here; may take minutes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")]
Families = Annotated[list[str] | None, typer.Option("--family", help="This family alone; may be given several times.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="This task alone; may be given several times.")]


def check(
    model: Given = None,
    config: OwnConfig = None,
    name: ModelName = None,
    export: Export = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model is, what serving it takes and whether it can be built; exit code 1 when it cannot."""
    from builders.check import as_json as plain
    from builders.check import check_model, check_settings

    if model is None and config is None:
        raise BuilderError("no model", remedy="name a MODEL, or the settings with --config")
    chosen = [check_settings(str(model))] if config is None else list(chosen_models(config, name))
    if model is not None and config is not None:
        if len(chosen) > 1:
            raise BuilderError(
                "which model's buckets and engine?", value=str(config), limit=f"{len(chosen)} models",
                remedy="choose one with --model, or leave MODEL out",
            )  # fmt: skip
        chosen = [chosen[0].model_copy(update={"model": check_settings(model).model})]
    screen, documents, failed = Console(highlight=False), [], False
    for settings in chosen:
        try:
            found = check_model(settings, export=export)
        except BuilderError as error:
            failed = True
            documents.append({"can_be_built": False, "source": settings.model.source, "reason": str(error)})
            if not as_json:
                screen.print(f"[bold red]cannot be built:[/] {escape(str(error))}", soft_wrap=True)
            continue
        documents.append(plain(found))
        if not as_json:
            _show(screen, found)
    if as_json:
        _write(documents[0] if len(documents) == 1 else documents)
    if failed:
        raise typer.Exit(1)


def matrix(family: Families = None, task: Tasks = None, as_json: AsJson = False) -> None:
    """Run the test matrix, family x task x class of length, on small random models; exit code 1 when a cell fails."""
    from builders.matrix import EDGE, LENGTHS, LIMIT, run_matrix

    rows = []
    for row in run_matrix(family or (), task or (), say):
        say(f"  {'ok' if row.passed else 'fails'}, {row.seconds:.1f} s")
        rows.append(row)
    if as_json:
        from dataclasses import asdict

        _write([{**asdict(row), "passed": row.passed} for row in rows])
    else:
        screen = Console(highlight=False)
        screen.print(_matrix_table(rows, LENGTHS))
        screen.print(f"buckets of {EDGE} and {LIMIT} tokens, which is the limit; each text beside a short one")
        for row in rows:
            for reason in dict.fromkeys(cell.reason for cell in row.cells if not cell.passed):
                where = ", ".join(cell.length for cell in row.cells if cell.reason == reason and not cell.passed)
                screen.print(f"[red]{row.family} {row.task}[/] at {where}: {escape(reason)}", soft_wrap=True)
        green = sum(cell.passed for row in rows for cell in row.cells)
        screen.print(f"{green} of {sum(len(row.cells) for row in rows)} cells are green")
    if not all(row.passed for row in rows):
        raise typer.Exit(1)


def _matrix_table(rows: Sequence[Row], lengths: dict[str, int]) -> Table:
    table = Table(
        "family", "task", *(f"{name} ({tokens})" if name != str(tokens) else name for name, tokens in lengths.items())
    )
    for place, row in enumerate(rows):
        cells = ["[green]ok[/]" if cell.passed else "[bold red]fails[/]" for cell in row.cells]
        first = place == 0 or rows[place - 1].family != row.family
        table.add_row(row.family if first else "", row.task, *cells)
    return table


def _show(screen: Console, found: ModelCheck) -> None:
    facts = {
        "model": found.source,
        "family": f"{found.family}: " + ", ".join(f"{value} {name}" for name, value in found.sizes.items()),
        "task": f"{found.task}: {found.output}, {found.head}",
        "labels": ", ".join(found.labels[:12]) + (f", ... ({len(found.labels)})" if len(found.labels) > 12 else ""),
        "dimensions": ", ".join(map(str, found.dimensions)),
        "prompts": ", ".join(found.prompts)
        + (f" (default: {found.default_prompt})" if found.default_prompt is not None else ""),
        "limits": f"{found.max_tokens} tokens a text; the model takes {found.positions}",
        "weights": f"{found.parameters / 1e6:.1f} million: "
        + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in found.weight_bytes.items()),
        "engine": f"{found.engine}, {found.precision}",
    }
    for name, text in facts.items():
        if text:
            screen.print(f"[bold]{name:<11}[/]{escape(text)}", soft_wrap=True)
    table = Table("bucket", "lane", "batch", "GFLOP a text", "activations, MB", "estimated ms")
    if found.export is not None:
        table.add_column("measured ms")
    for bucket in found.buckets:
        row = [
            str(bucket.length),
            bucket.lane,
            str(bucket.batch),
            f"{bucket.flops / 1e9:.2f}",
            f"{bucket.activation_bytes / 1e6:.0f}",
            f"{bucket.estimated_ms:.3g}",
        ]
        table.add_row(*row, *([] if bucket.measured_ms is None else [f"{bucket.measured_ms:.3g}"]))
    screen.print(table)
    screen.print(
        f"Estimated: one text alone, by its operations, at the rate of {found.estimated_from}. Activations: of a whole "
        "batch, nothing fused.",
        soft_wrap=True,
    )
    if found.export is not None:
        screen.print("Measured: one text alone, this machine, ONNX Runtime in FP32, one thread.", soft_wrap=True)
        for name, nodes in (("exported", found.export.operators), ("fused", found.export.fused)):
            listed = ", ".join(f"{count} {kind}" for kind, count in nodes.items())
            screen.print(f"[bold]{name:<11}[/]{sum(nodes.values())} nodes: {listed}", soft_wrap=True)
        screen.print(
            f"the graph against torch: cosine {found.export.least_cosine:.7f}, off by {found.export.largest_error:.2g}"
        )
    for note in (found.notice, *found.notes):
        if note:
            screen.print(f"- {escape(note)}", soft_wrap=True)
    screen.print("[green]can be built[/]")


def _write(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
