"""What a load run leaves: tables on the terminal, and a folder with JSON lines, a summary, plots and one HTML page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clients.errors import EncoderError, InvalidInput
from clients.load.metrics import Reading, Series, batch_sizes, pending, rates
from clients.load.page import BENCH_EXTRA, Grid, Image, Page, PageSection, render
from clients.load.records import Records, write_records
from clients.load.summary import Group, Summary
from clients.screen import print_whole

_COLUMNS = ("", "requests", "failed", "P50 ms", "P90 ms", "P99 ms", "P99.9 ms", "longest ms")


@dataclass(frozen=True)
class LoadRun:
    """A finished run."""

    title: str
    records: Records
    summary: Summary
    readings: tuple[Reading, ...] = ()


def latency_grid(title: str, groups: Sequence[Group]) -> Grid:
    """Latency by group; a figure in brackets has fewer than five samples beyond it."""
    return Grid(title, _COLUMNS, tuple(_row(group) for group in groups))


def _row(group: Group) -> tuple[str, ...]:
    p90, p99, p999 = (milliseconds(value) for value in (group.p90, group.p99, group.p999))
    return (
        group.name,
        str(group.requests),
        str(group.failed),
        milliseconds(group.p50),
        p90 if group.sure_p90 else f"({p90})",
        p99 if group.sure_p99 else f"({p99})",
        p999 if group.sure_p999 else f"({p999})",
        milliseconds(group.longest),
    )


def milliseconds(value: float) -> str:
    """A latency for people: three digits or so; a dash when there is none."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}" if math.isfinite(value) else "–"


def summary_grid(summary: Summary) -> Grid:
    """The run's figures that are no latency."""
    rows = [
        ("loop", summary.loop),
        ("seconds", f"{summary.seconds:.1f}"),
        *([("offered, texts/s", f"{summary.offered:.1f}")] if summary.offered else []),
        ("answered, texts/s", f"{summary.throughput:.1f}"),
        *((f"error: {kind}", str(count)) for kind, count in sorted(summary.errors.items())),
    ]
    if summary.loop == "open":
        rows.append(("generator late, P99 / longest", f"{summary.late_p99_ms:.1f} / {summary.late_max_ms:.1f} ms"))
    elif summary.busy:
        rows.append(("generator's busiest process", f"{100 * summary.busy:.0f} % of the time"))
    return Grid("figures of the run", ("figure", "value"), tuple(rows))


def latency_grids(summary: Summary) -> tuple[Grid, ...]:
    """All requests and classes, then lengths, then the parts of a rate that changes."""
    classes = summary.classes if len(summary.classes) > 1 else ()
    since = "the scheduled time" if summary.loop == "open" else "sending (a stall is met once a client)"
    return (
        latency_grid(f"latency from {since}, by class", (summary.overall, *classes)),
        latency_grid("by length, tokens", summary.lengths),
        *([latency_grid("by part of the profile", summary.stretches)] if summary.stretches else []),
    )


def print_grid(console: Console, grid: Grid) -> None:
    """A grid on the terminal, or in a file, at its full width: a figure is never cut."""
    table = Table(title=escape(grid.title), title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(grid.columns):
        table.add_column(escape(name), justify="right" if number else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    print_whole(console, table)
    console.print()


def print_run(console: Console, run: LoadRun) -> None:
    """A run's tables and warnings on the terminal."""
    for grid in (summary_grid(run.summary), *latency_grids(run.summary)):
        print_grid(console, grid)
    for warning in run.summary.warnings:
        console.print(f"[bold yellow]{escape(warning)}[/]", soft_wrap=True)


def run_section(run: LoadRun) -> PageSection:
    """A run as a part of a page, with its plots.

    Raises:
        InvalidInput: matplotlib is not installed.
    """
    plots = _plots()
    images = [
        Image(
            "latency_cdf",
            "latency, share of the requests that took longer or failed",
            plots.plot_cdf({"all": run.records}),
        ),
        Image("latency_time", "latency over time", plots.plot_latency(run.records)),
    ]
    if len(run.readings) > 1:
        waiting = pending(run.readings)
        # The lanes' queues are short by design; the backlog stands in the entry's.
        entry = {name: values for name, values in waiting.values.items() if not name.startswith("encoder_")}
        queue = plots.plot_series(Series(waiting.at, entry), "requests", idle=True)
        images += [
            Image("batch_sizes", "texts per execution", plots.plot_series(batch_sizes(run.readings), "texts")),
            Image("queue", "waiting in the entry's queue", queue),
            Image("lanes", "texts a second by model", plots.plot_series(rates(run.readings), "texts/s")),
        ]
    grids = (summary_grid(run.summary), *latency_grids(run.summary))
    return PageSection(run.title, grids, tuple(images), run.summary.warnings)


def prepare_folder(folder: Path) -> None:
    """Makes the folder of a report, and sees before the load that it can be written, and with what.

    Raises:
        InvalidInput: it cannot be made or written, or Jinja2 or matplotlib is not installed.
    """
    _plots()
    if find_spec("jinja2") is None:
        raise InvalidInput("jinja2 is not installed", remedy=BENCH_EXTRA)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("the folder of the report cannot be made", value=str(folder), limit=error.strerror) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput("the folder of the report cannot be written", value=str(folder))


def write_run(folder: Path, run: LoadRun, about: Sequence[str]) -> Path:
    """Writes requests.jsonl, summary.json, the plots and report.html into a folder, made if it is missing.

    Args:
        folder: where.
        run: the run.
        about: lines for the head of the page: the target, the load, the machine.

    Returns:
        The page.

    Raises:
        EncoderError: the folder cannot be written.
        InvalidInput: Jinja2 or matplotlib is not installed.
    """
    section = run_section(run)
    page = Page(run.title, tuple(about), (section,))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_records(folder / "requests.jsonl", run.records)
        (folder / "summary.json").write_text(plain_json(asdict(run.summary)), encoding="utf-8")
        return write_page(folder, page)
    except OSError as error:
        raise EncoderError("the report cannot be written", value=str(folder), limit=error.strerror) from None


def write_page(folder: Path, page: Page) -> Path:
    """Writes the page's plots as PNG files, and the page itself, whole, as report.html."""
    for section in page.sections:
        for image in section.images:
            (folder / f"{image.name}.png").write_bytes(image.png)
    path = folder / "report.html"
    path.write_text(render(page), encoding="utf-8")
    return path


def plain_json(document: Any) -> str:
    """JSON that every reader takes: NaN and infinity are null."""
    return json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same of dicts, lists and values, with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plots() -> Any:
    try:
        from clients.load import plots
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise InvalidInput(f"{package} is not installed", remedy=BENCH_EXTRA) from None
    return plots
