"""Tables of a bench for the terminal, and one HTML page with its plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from builders.bench.result import BenchResult, Row, chosen, pooled
from builders.bench.rounds import Measurement
from clients.load.page import Grid, Image, Page, PageSection
from clients.load.records import Records, joined
from clients.load.report import LoadRun, milliseconds, run_section, write_page
from clients.load.summary import LENGTHS, percentile_of

_SHORT = 128


def side_by_side(result: BenchResult) -> Grid:
    """Maximum throughput, latency at the rate and CPU share of each server; relative figures against the first."""
    columns = (
        "server",
        "max texts/s",
        "relative",
        "CPU then",
        "P50 ms",
        "P90 ms",
        "P99 ms",
        "P99 rel.",
        "CPU then",
        "failed",
    )
    rows = []
    first = next(iter(result.drivers), "")
    base_rate, base_p99 = _rate(result, first), pooled(result.latencies(first), 99)
    for name in result.drivers:
        closed, opened, latencies = result.of(name, "closed"), result.of(name, "open"), result.latencies(name)
        p99 = pooled(latencies, 99)
        rows.append(
            (
                name,
                _spread([row.throughput for row in closed]),
                _ratio(_rate(result, name), base_rate),
                _cpu(closed),
                *(milliseconds(pooled(latencies, share)) for share in (50, 90, 99)),
                _ratio(p99, base_p99),
                _cpu(opened),
                str(sum(row.failed for row in (*closed, *opened))),
            )
        )
    title = (
        f"closed loop of {result.load.clients} clients (texts/s: median of the rounds, lowest to highest), then open "
        f"loop at {result.load.rate:g} texts/s, latency from the scheduled time"
    )
    return Grid(title, columns, tuple(rows))


def by_class(result: BenchResult) -> Grid:
    """P50, P90 and P99 of each class, open loop."""
    kinds = sorted({kind for row in result.rows if row.loop == "open" for kind in row.kinds})
    return _groups(result, "by class", {kind: _of_kind(kind) for kind in kinds})


def by_length(result: BenchResult) -> Grid:
    """P50, P90 and P99 of each group of lengths, open loop, and of all up to 128 tokens together.

    Lengths are those of the texts as they were sent; a server may have cut what was over its limit.
    """
    groups = {f"up to {_SHORT}": _up_to(0, _SHORT)}
    low = 0
    for high in LENGTHS:
        groups[f"{low + 1}–{high}"] = _up_to(low, high)
        low = high
    if any(tokens > low for row in result.rows if row.loop == "open" for tokens in row.tokens):
        groups[f"over {low}"] = lambda kind, tokens: tokens > LENGTHS[-1]
    return _groups(result, "by tokens", groups)


def servers(result: BenchResult) -> Grid:
    """What each row is."""
    return Grid("servers", ("name", "what it is"), tuple(result.drivers.items()))


def not_shown(techniques: Sequence[tuple[str, str]]) -> Grid:
    """Techniques that have no row, and why."""
    return Grid("not in this table", ("technique", "why"), tuple(techniques))


def ladder_grid(result: BenchResult) -> Grid:
    """The before/after table: each row has one technique more than the one above; relative to the first."""
    columns = (
        "with",
        "max texts/s",
        "relative",
        "P50 ms",
        "P99 ms",
        "P99 rel.",
        f"≤ {_SHORT} tokens P99",
        "interactive P99",
        "longest of first 20",
        "CPU",
        "failed",
    )
    first = next(iter(result.drivers), "")
    base_rate, base_p99 = _rate(result, first), pooled(result.latencies(first), 99)
    rows = []
    for name in result.drivers:
        opened, latencies = result.of(name, "open"), result.latencies(name)
        early = [value for row in result.of(name, "first") for value in row.latencies]
        rows.append(
            (
                name,
                _spread([row.throughput for row in result.of(name, "closed")]),
                _ratio(_rate(result, name), base_rate),
                milliseconds(pooled(latencies, 50)),
                milliseconds(pooled(latencies, 99)),
                _ratio(pooled(latencies, 99), base_p99),
                milliseconds(percentile_of(chosen(opened, _up_to(0, _SHORT)), 99)),
                milliseconds(percentile_of(chosen(opened, _of_kind("interactive")), 99)),
                milliseconds(max(early, default=math.nan)),
                _cpu(opened),
                str(sum(row.failed for row in result.rows if row.driver == name)),
            )
        )
    title = f"each technique switched on in turn; latency at {result.load.rate:g} texts/s"
    return Grid(title, columns, tuple(rows))


def write_report(
    folder: Path,
    title: str,
    lines: Sequence[str],
    parts: Sequence[tuple[str, BenchResult, Sequence[Grid], Sequence[Measurement]]],
) -> Path:
    """The HTML page and its plots.

    Args:
        folder: where; made if it is missing.
        title: of the page.
        lines: for its head.
        parts: title, result, tables and measurements of each part.

    Returns:
        The page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, (name, result, grids, measured) in enumerate(parts):
        images = _images(result, measured, f"part{number + 1}_")
        sections.append(PageSection(name, tuple(grids), images, result.notes))
        detail = [one for one in measured if one.readings and one.loop != "first"]
        for one in _last_of_each(detail) if number == 0 else ():
            run = LoadRun(f"{one.driver}, {one.loop} loop, last round", one.records, one.summary, one.readings)
            section = run_section(run)
            images = tuple(
                Image(f"{_slug(run.title)}_{image.name}", image.title, image.png) for image in section.images
            )
            sections.append(PageSection(section.title, section.tables, images, section.notes))
    return write_page(folder, Page(title, tuple(lines), tuple(sections)))


def _images(result: BenchResult, measured: Sequence[Measurement], prefix: str) -> tuple[Image, ...]:
    from clients.load.plots import plot_bars, plot_cdf

    runs: dict[str, Records] = {}
    for name in result.drivers:
        records = [one.records for one in measured if one.driver == name and one.loop == "open"]
        if records:
            runs[name] = joined(records)
    rates = {name: rate for name in result.drivers if math.isfinite(rate := _rate(result, name))}
    return (
        Image(f"{prefix}throughput", "maximum throughput, median of the rounds", plot_bars(rates, "texts/s")),
        Image(f"{prefix}latency_cdf", f"latency at {result.load.rate:g} texts/s, all rounds", plot_cdf(runs)),
    )


def _last_of_each(measured: Sequence[Measurement]) -> list[Measurement]:
    last = {(one.driver, one.loop): one for one in measured}
    return list(last.values())


def _groups(result: BenchResult, title: str, groups: dict[str, Callable[[str, int], bool]]) -> Grid:
    rows = []
    for name in result.drivers:
        opened = result.of(name, "open")
        cells = []
        for keep in groups.values():
            values = chosen(opened, keep)
            cells.append(" / ".join(milliseconds(percentile_of(values, share)) for share in (50, 90, 99)))
        rows.append((name, *cells))
    whole = f"{title} at {result.load.rate:g} texts/s, P50 / P90 / P99 ms"
    return Grid(whole, ("server", *groups), tuple(rows))


def _of_kind(wanted: str) -> Callable[[str, int], bool]:
    return lambda kind, tokens: kind == wanted


def _up_to(low: int, high: int) -> Callable[[str, int], bool]:
    return lambda kind, tokens: low < tokens <= high


def _rate(result: BenchResult, driver: str) -> float:
    rates = result.throughputs(driver)
    return median(rates) if rates else math.nan


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{median(values):.1f}" + (f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else "")


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base and math.isfinite(value / base) else "–"


def _cpu(rows: Sequence[Row]) -> str:
    return f"{100 * median(row.cpu_share for row in rows):.0f} %" if rows else "–"


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text.lower())
