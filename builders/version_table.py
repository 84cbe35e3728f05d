"""The table that `versions` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from builders.manifest import BucketTime
from builders.versions import VersionRow


def version_table(rows: Sequence[VersionRow]) -> Table:
    """One row per version; fits a terminal of 100 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("version", justify="right")
    for name in ("state", "model", "engine", "buckets", "accuracy loss", "built", "commit"):
        table.add_column(name)
    for row in rows:
        facts = ["?"] * 6
        if row.manifest is not None:
            made = row.manifest
            worst = max((line.loss for line in made.accuracy), default=None)
            lengths = [bucket.length for bucket in made.buckets]
            facts = [
                escape(made.model.removeprefix("sentence-transformers__")),
                f"{made.engine} {made.precision}",
                f"{len(lengths)}: {lengths[0]}…{lengths[-1]}",
                "not measured" if worst is None else f"{worst:.2%}",
                made.date[:16].replace("T", " "),
                (made.git_commit or "?")[:8],
            ]
        table.add_row(str(row.version), _state(row), *facts, style="bold green" if row.served else "")
    return table


def latency_table(rows: Sequence[VersionRow]) -> Table | None:
    """Milliseconds for one text and for a full batch by version and bucket; None where nothing was measured."""
    timed = [(row.version, row.manifest.latency) for row in rows if row.manifest and row.manifest.latency]
    if not timed:
        return None
    lengths = sorted({time.length for _, latency in timed for time in latency.buckets})
    table = Table(box=None, pad_edge=False)
    for name in ("version", *map(str, lengths)):
        table.add_column(name, justify="right")
    table.add_column("ms for one text / a full batch, measured at its build with")
    for version, latency in timed:
        found = {time.length: time for time in latency.buckets}
        cells = [_times(found[length]) if length in found else "-" for length in lengths]
        table.add_row(str(version), *cells, escape(latency.how))
    return table


def _times(time: BucketTime) -> str:
    one = f"{time.one_ms:.3g}"
    return one if time.batch_ms is None else f"{one} / {time.batch_ms:.3g}"


def _state(row: VersionRow) -> str:
    if row.problem:
        return "[red]damaged[/]"
    if row.served:
        return "served"
    if row.trial is not None:
        return f"canary, {row.trial.share:.1%}" if row.on_trial else "canary's lanes left"
    if row.previous:
        return "previous, lanes loaded" if row.loaded else "previous"
    return "lanes loaded" if row.loaded else ""
