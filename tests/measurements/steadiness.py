"""Is a server after minutes of the same load what it was at their beginning? Windows of it, limits, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tests.tools.footprint import Footprint
from tests.tools.promises import markdown


@dataclass(frozen=True)
class Window:
    """One stretch of the load, 30 s of the long soak.

    Attributes:
        at: its end, seconds from the start of the load.
        seconds: its length.
        answered, failed: requests that were due in it.
        errors: kind of error -> requests.
        p50, p99: latency of the answered ones from when they were due, milliseconds.
        classes: P50 and P99 of each class.
        late_p99: P99 of the generator's own delay, milliseconds.
        entry: the entry's executions a second, by Triton's own count.
        lanes: those of all bucket models together.
        footprint: what the server held at its end.
    """

    at: float
    seconds: float
    answered: int
    failed: int
    errors: Mapping[str, int]
    p50: float
    p99: float
    classes: Mapping[str, tuple[float, float]]
    late_p99: float
    entry: float
    lanes: float
    footprint: Footprint

    def row(self) -> dict[str, Any]:
        """For JSON; numbers that are none become null."""
        row: dict[str, Any] = _plain(asdict(self))
        return row


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


@dataclass(frozen=True)
class Limits:
    """How far the end may be from the beginning.

    Attributes:
        p99: median of the windows' P99, either way, share.
        executions: executions a second, either way, share.
        memory: growth of the own memory of the server and its model processes together, share.
        part_mib: growth of the server's alone, and of the entry processes', MiB. Most of the whole is weights: a leak
            of 300 bytes a request would not show in 2 % of it within half an hour.
        descriptors: more open files.
        threads: more threads. The entry's pools grow to their bounds when a backlog first needs them.
        shared: more files in shared memory, and more MiB of them.
        failed: requests without an answer, share of all.
        late_ms: P99 of the generator's own delay, median of the windows.
    """

    p99: float = 0.25
    executions: float = 0.03
    memory: float = 0.02
    part_mib: float = 4.0
    descriptors: float = 2
    threads: float = 16
    shared: float = 0
    failed: float = 0.001
    late_ms: float = 10.0


@dataclass(frozen=True)
class Line:
    """One criterion.

    Attributes:
        what: it is about.
        first, last: the two figures that are compared; None where there is one alone.
        value: what is held against the limit: a share when `share`, else in the figures' own unit.
        limit: the most.
        share: whether value and limit are shares of 1.
        either_way: whether a fall counts as much as a rise.
        note: for people.
    """

    what: str
    first: float | None
    last: float | None
    value: float
    limit: float
    share: bool = False
    either_way: bool = False
    note: str = field(default="")

    @property
    def holds(self) -> bool:
        """A value that is no number does not."""
        return (abs(self.value) if self.either_way else self.value) <= self.limit

    def cells(self) -> list[str]:
        """What, first, last, value, limit, verdict."""
        shown = "{:+.1%}" if self.share and self.first is not None else "{:.2%}" if self.share else "{:+.3g}"
        limit = f"{'±' if self.either_way else ''}{self.limit:g}"
        if self.share:
            limit = f"{'±' if self.either_way else ''}{100 * self.limit:g} %"
        ends = ["—" if value is None else f"{value:.4g}" for value in (self.first, self.last)]
        value = shown.format(self.value).replace("%", " %")
        return [self.what, *ends, value, limit, ("holds" if self.holds else "FAILS") + self.note]


def judge(windows: Sequence[Window], compared: int, limits: Limits) -> list[Line]:
    """Hold the end of a run against its beginning.

    The load is one trace of `compared` windows, sent over and over. So the first and the last `compared` windows got
    the same requests at the same times, and neither P99 nor executions differ by the chance of a Poisson process: with
    a new trace for each, the number of requests alone would differ by 1 % in five minutes at 50 a second, and by more
    the few long texts that make the P99. What is left is the server's. (Executions for each answer would be fair with
    other traces too, but only half: with more requests a second, batches are larger.)

    Memory, open files and shared memory are compared after the first turn of the trace: what every length and batch
    size needs once (ONNX Runtime's arenas, malloc's, Triton's regions) is taken in it and kept. Then three fifths of
    a turn are held against as many at the end: minutes 5 to 8 and the last three of the long soak.

    Args:
        windows: of the whole run, in order.
        compared: windows of one turn of the trace.
        limits: what is allowed.

    Raises:
        ValueError: too few windows to compare, or part of a turn.
    """
    if len(windows) < 3 * compared or len(windows) % compared:
        raise ValueError(f"{len(windows)} windows: at least 3 turns of {compared} windows, and whole turns, are needed")
    first, last = windows[:compared], windows[-compared:]
    few = max(1, compared * 3 // 5)
    settled, end = windows[compared : compared + few], windows[-few:]
    sent = sum(window.answered + window.failed for window in windows)
    failed = sum(window.failed for window in windows)

    def changed(what: str, figure: Callable[[Sequence[Window]], float], limit: float, note: str = "") -> Line:
        before, after = figure(first), figure(last)
        value = after / before - 1 if before else math.nan
        return Line(what, before, after, value, limit, share=True, either_way=True, note=note)

    def grown(what: str, of: Callable[[Footprint], float], limit: float, *, share: bool = False) -> Line:
        before, after = _median(of(one.footprint) for one in settled), _median(of(one.footprint) for one in end)
        value = after - before
        if share:
            value = after / before - 1 if before else math.nan
        return Line(what, before, after, value, limit, share=share)

    gone = set(windows[0].footprint.pids) - set(windows[-1].footprint.pids)
    memory = [
        grown("memory of all, MiB", lambda f: f.server.own + f.models.own, limits.memory, share=True),
        grown("memory of the server alone, MiB", lambda f: f.server.own, limits.part_mib),
        grown("memory of the entry processes alone, MiB", _of_entry, limits.part_mib),
    ]
    return [
        changed("P99, median of the windows, ms", lambda part: _median(w.p99 for w in part), limits.p99),
        changed("executions of the entry a second", lambda part: _mean(w.entry for w in part), limits.executions),
        changed("executions of the lanes a second", lambda part: _mean(w.lanes for w in part), limits.executions),
        *memory,
        grown("open files", lambda f: f.server.descriptors + f.models.descriptors, limits.descriptors),
        grown("threads", lambda f: f.server.threads + f.models.threads, limits.threads),
        grown("files in shared memory", lambda f: f.regions, limits.shared),
        grown("shared memory, MiB", lambda f: f.shared, limits.shared),
        Line("model processes that ended", None, None, len(gone), 0),
        Line("requests without an answer", None, None, failed / sent if sent else math.nan, limits.failed, share=True),
        Line("generator's own delay, P99, ms", None, None, _median(w.late_p99 for w in windows), limits.late_ms),
    ]


def _of_entry(footprint: Footprint) -> float:
    return sum(mib for name, mib in footprint.instances.items() if name.startswith("encode_"))


def growth_by_process(windows: Sequence[Window], compared: int) -> dict[str, float]:
    """MiB that each model process has grown by since the first turn of the trace, the one that grew most first."""
    few = max(1, compared * 3 // 5)
    settled, end = windows[compared : compared + few], windows[-few:]
    names = set(settled[0].footprint.instances) & set(end[-1].footprint.instances)

    def held(part: Sequence[Window], name: str) -> float:
        return _median(one.footprint.instances.get(name, math.nan) for one in part)

    grown = {name: held(end, name) - held(settled, name) for name in names}
    return dict(sorted(grown.items(), key=lambda pair: -pair[1]))


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The criteria in Markdown."""
    yield from markdown(
        ["promise", "at first", "at the end", "change", "limit", "verdict"], [line.cells() for line in lines]
    )


def turns_table(windows: Sequence[Window], compared: int) -> Iterator[str]:
    """A row for each turn of the trace in Markdown: what the criteria do not show, and what lies between the ends."""
    names = sorted({name for window in windows for name in window.classes})
    header = ["minutes", "answered/s", "failed", "P50", "P99", *(f"P99 {name}" for name in names)]
    header += ["entry exec/s", "lanes exec/s", "answers an entry exec", "CPU, cores", "server MiB", "models MiB"]
    rows = []
    for number in range(0, len(windows), compared):
        part = windows[number : number + compared]
        seconds, answered = sum(one.seconds for one in part), sum(one.answered for one in part)
        entry, lanes = (_mean(getattr(one, name) for one in part) for name in ("entry", "lanes"))
        ends = [windows[number - 1] if number else part[0], part[-1]]
        used = [one.footprint.server.cpu_s + one.footprint.models.cpu_s for one in ends]
        passed = ends[1].at - ends[0].at
        rows.append(
            [
                f"{(part[0].at - part[0].seconds) / 60:.3g}–{part[-1].at / 60:.3g}",
                f"{answered / seconds:.1f}",
                str(sum(one.failed for one in part)),
                f"{_median(one.p50 for one in part):.1f}",
                f"{_median(one.p99 for one in part):.0f}",
                *(f"{_median(one.classes.get(name, (0, math.nan))[1] for one in part):.0f}" for name in names),
                f"{entry:.2f}",
                f"{lanes:.2f}",
                f"{answered / seconds / entry if entry else math.nan:.3f}",
                f"{(used[1] - used[0]) / passed if passed else math.nan:.2f}",
                f"{_median(one.footprint.server.own for one in part):.1f}",
                f"{_median(one.footprint.models.own for one in part):.1f}",
            ]
        )
    yield from markdown(header, rows)


def _median(values: Iterator[float]) -> float:
    return float(np.median(list(values)))


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))
