"""What is swept: each axis is a handful of changes to the settings that were best so far."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from builders.bench.driver import BenchError
from builders.settings import DeploySettings

PROCESSES = (1, 2, 4, 8, 16)
_CELL = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*([0-9]+)\s*")


@dataclass(frozen=True)
class Setting:
    """A row of an axis.

    Attributes:
        label: its value, for the table: `10 ms / 32`.
        overrides: nested mapping over the settings, as in deploy.yaml.
    """

    label: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """One thing that is varied.

    Attributes:
        name: as `--only` takes it.
        title: for the table.
        settings: the values, that of the settings so far first.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]


def parse_grid(spec: str) -> tuple[tuple[float, int], ...]:
    """Reads "5/16, 10/32": windows in milliseconds and batches in texts.

    Raises:
        BenchError: another form, or a batch of 0.
    """
    found = [_CELL.fullmatch(part) for part in spec.split(",")]
    cells = tuple((float(match[1]), int(match[2])) for match in found if match)
    if len(cells) < len(found) or any(batch < 1 for _, batch in cells):
        raise BenchError("the grid cannot be read", value=spec, limit="WINDOW_MS/BATCH, …, for example 5/16, 10/32")
    return cells


def window_axis(settings: DeploySettings, cells: Iterable[tuple[float, int]]) -> Axis:
    """How long the queue gathers, and how much at once (`entry.window_ms`, `entry.batch`).

    `lanes.long.bound` grows with the batch where it must: a full batch of long texts has to fit.
    """
    bound = settings.lanes.long.bound

    def setting(cell: tuple[float, int]) -> Setting:
        window, batch = cell
        overrides: dict[str, Any] = {"entry": {"window_ms": window, "batch": batch}}
        if batch > bound:
            overrides["lanes"] = {"long": {"bound": batch}}
        return Setting(f"{window:g} ms / {batch}", overrides)

    now = (settings.entry.window_ms, settings.entry.batch)
    return _axis("window", "window / batch", now, cells, setting)


def processes_axis(settings: DeploySettings, cores: int) -> Axis:
    """Tokenising processes, up to two a core: a process waits for its lanes most of its time."""
    values = [count for count in PROCESSES if count <= max(2, 2 * cores)]
    return _axis(
        "processes",
        "entry processes",
        settings.entry.processes,
        values,
        lambda count: Setting(f"{count} processes" if count > 1 else "1 process", {"entry": {"processes": count}}),
    )


def threads_axis(settings: DeploySettings, cores: int) -> Axis | None:
    """Threads of the CPU engine, of both lanes; None for another engine, which has none."""
    if settings.engine.kind != "onnxruntime":
        return None
    lanes = settings.lanes
    values = [(count, count) for count in (1, 2, 4, 8) if count <= cores]

    def setting(pair: tuple[int, int]) -> Setting:
        short, long = pair
        label = f"{short} a lane" if short == long else f"{short} short, {long} long"
        return Setting(label, {"lanes": {"short": {"threads": short}, "long": {"threads": long}}})

    return _axis("threads", "engine threads", (lanes.short.threads, lanes.long.threads), values, setting)


def buckets_axis(settings: DeploySettings, used: Sequence[int], found: Iterable[Sequence[int]]) -> Axis:
    """Bucket edges.

    Args:
        settings: so far.
        used: buckets that are served with them; settings may name more than the model can fill.
        found: other edges; those that split no lane are swept.
    """
    lanes = settings.lanes

    def setting(edges: tuple[int, ...]) -> Setting:
        return Setting(", ".join(str(edge) for edge in edges), {"buckets": edges})

    fitting = [
        tuple(edges) for edges in found if not any(lanes.short.up_to < edge <= lanes.long.above for edge in edges)
    ]
    axis = _axis("buckets", "buckets", tuple(used), fitting, setting)
    # The file's own list as it stands: written out it would only say less.
    return Axis(axis.name, axis.title, (Setting(axis.settings[0].label), *axis.settings[1:]))


def _axis(name: str, title: str, now: Any, values: Iterable[Any], setting: Any) -> Axis:
    rows = [now, *(value for value in dict.fromkeys(values) if value != now)]
    return Axis(name, title, tuple(setting(value) for value in rows))
