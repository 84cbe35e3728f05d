"""A soak: the same load for many minutes, well below the maximum. Does anything drift, leak or slow down?

`python -m tests.measurements.soak --minutes 30` starts the product as `deploy.cpu.yaml` says, finds the most it does
(closed loop), and offers 70 % of that in open loop: mixed lengths, half of the requests interactive, latency from the
scheduled time. Every 30 s it prints a line and keeps what Triton counted and what the processes held. At the end it
holds the last five minutes against the first five (tests/measurements/steadiness.py says how, and why the load is one
trace over and over), prints the tables and writes `soak.md` and `soak.jsonl`; exit code 1 when a line is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from builders.ports import free_ports
from builders.server import TritonServer
from clients.load.metrics import EXECUTIONS, parse_metrics
from clients.load.plan import Plan, Segment, closed_plan, open_plan, parse_classes
from clients.load.records import OK, Records, joined
from clients.load.run import LoadOptions, default_processes, run_load
from clients.load.summary import summarise
from clients.load.target import Target
from clients.load.texts import DEFAULT_MIX, Mix, TextSource
from tests.measurements.steadiness import Limits, Line, Window, growth_by_process, judge, table, turns_table
from tests.tools.footprint import Footprint, footprint
from tests.tools.repositories import repository
from tests.tools.steady_load import SteadyLoad

CLASSES = parse_classes(["interactive 50%", "background 50%"])
#: How long after a window its line is printed, so that its last requests have ended, seconds.
_GRACE_S = 2.0


@dataclass(frozen=True)
class Shape:
    """How a soak is run.

    Attributes:
        window_s: seconds of a window.
        compared: windows of one turn of the trace, which is what the ends are compared over.
        turns: of the trace.
        load: share of the maximum that is offered.
        mix: lengths.
        clients: of the closed loop that finds the maximum.
        maximum_s, warm_s: how long that runs, and then the load before the first window, seconds.
        most_rate: the most that is offered, requests a second; what the generator can do beside the server.
        seed: of the trace.
    """

    window_s: float = 30.0
    compared: int = 10
    turns: int = 6
    load: float = 0.7
    mix: Mix = field(default_factory=lambda: Mix.parse(DEFAULT_MIX))
    clients: int = 32
    maximum_s: float = 25.0
    warm_s: float = 60.0
    most_rate: float = 1000.0
    seed: int = 1

    @property
    def turn_s(self) -> float:
        """Seconds of one turn."""
        return self.window_s * self.compared


@dataclass(frozen=True)
class Outcome:
    """What a soak gave: the maximum and the rate offered, requests a second; its windows, and the verdict."""

    maximum: float
    rate: float
    shape: Shape
    windows: Sequence[Window]
    lines: Sequence[Line]

    @property
    def holds(self) -> bool:
        """Whether every line does."""
        return all(line.holds for line in self.lines)

    def text(self) -> Iterator[str]:
        """The tables in Markdown."""
        turn = f"{self.shape.turn_s:g} s"
        yield (
            f"Maximum {self.maximum:.1f} requests/s (closed loop, {self.shape.clients} clients); offered "
            f"{self.rate:.1f}/s = {self.rate / self.maximum:.0%}, a trace of {turn} sent {self.shape.turns} times; "
            f"{len(self.windows)} windows of {self.shape.window_s:g} s."
        )
        yield ""
        yield from table(self.lines)
        yield ""
        yield "Each turn of the trace (latency in ms: medians of its windows; memory in MiB):"
        yield ""
        yield from turns_table(self.windows, self.shape.compared)
        grown = list(growth_by_process(self.windows, self.shape.compared).items())
        yield ""
        yield "Model processes that grew most since the first turn, MiB: " + ", ".join(
            f"{name} {by:+.2f}" for name, by in grown[:4]
        )


def soak(
    server: TritonServer,
    shape: Shape,
    limits: Limits,
    tell: Callable[[str], None] = print,
    keep: Callable[[Sequence[Window]], None] = lambda windows: None,
) -> Outcome:
    """Run one on a server that is ready.

    Args:
        server: with an entry `encode` alone under load.
        shape: of the run.
        limits: to judge it by.
        tell: gets a line a window.
        keep: gets the windows so far after each, and all of them, complete, at the end.
    """
    target, source = Target(server.grpc_url), TextSource()
    maximum = _maximum(target, source, shape)
    rate = min(shape.load * maximum, shape.most_rate)
    tell(f"maximum {maximum:.1f}/s; offering {rate:.1f}/s")
    warm = open_plan(source, [Segment(rate, rate, shape.warm_s)], CLASSES, shape.mix, seed=shape.seed + 1)
    run_load(target, warm, LoadOptions(1))
    trace = open_plan(source, [Segment(rate, rate, shape.turn_s)], CLASSES, shape.mix, seed=shape.seed)
    windows = _windows(server, target, trace, shape, tell, keep)
    return Outcome(maximum, rate, shape, windows, judge(windows, shape.compared, limits))


def _maximum(target: Target, source: TextSource, shape: Shape) -> float:
    plan = closed_plan(source, 2000, shape.maximum_s, CLASSES, shape.mix, seed=shape.seed + 2)
    records = run_load(target, plan, LoadOptions(default_processes(), shape.clients))
    summary = summarise(records, plan, clients=shape.clients, warm_s=min(5.0, shape.maximum_s / 4))
    if summary.errors:
        raise RuntimeError(f"requests failed while the maximum was measured: {dict(summary.errors)}")
    return summary.throughput


@dataclass(frozen=True)
class _Reading:
    """What a server counted and held at one moment, seconds from the start of the load."""

    at: float
    executions: Mapping[str, float]
    footprint: Footprint

    @property
    def entry(self) -> float:
        return self.executions.get("encode", 0.0)

    @property
    def lanes(self) -> float:
        return sum(count for model, count in self.executions.items() if model.startswith("encoder_"))


def _read(server: TritonServer, start: float) -> _Reading:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:  # noqa: S310 - loopback
        page = response.read().decode()
    at = time.monotonic() - start
    held = footprint(server.pid or 0, server._shm_prefix)
    return _Reading(at, parse_metrics(page).get(EXECUTIONS, {}), held)


def _windows(
    server: TritonServer,
    target: Target,
    trace: Plan,
    shape: Shape,
    tell: Callable[[str], None],
    keep: Callable[[Sequence[Window]], None],
) -> list[Window]:
    readings: list[_Reading] = []
    windows: list[Window] = []
    # By window, so that the work of a line stays the same however long the soak has been going on beside the server.
    records = [Records() for _ in range(shape.compared * shape.turns)]

    def sort(fresh: Records) -> None:
        places = (np.asarray(fresh.scheduled) // shape.window_s).astype(int)
        for place in set(places.tolist()):
            records[place] = joined([records[place], fresh.where(places == place)])

    with SteadyLoad(target, trace, shape.turns) as load:
        sort(load.until(0.0))
        readings.append(_read(server, load.start))
        for number in range(len(records)):
            end = (number + 1) * shape.window_s
            sort(load.until(end))
            readings.append(_read(server, load.start))
            sort(load.until(end + min(_GRACE_S, shape.window_s / 3)))
            windows.append(_window(records[number], readings[number], readings[number + 1], end, shape))
            tell(_told(windows[-1]))
            keep(windows)
        sort(load.rest())
    # Once more, with the requests that took longer than the grace.
    windows = [
        _window(own, readings[number], readings[number + 1], windows[number].at, shape)
        for number, own in enumerate(records)
    ]
    keep(windows)
    return windows


def _window(own: Records, before: _Reading, after: _Reading, at: float, shape: Shape) -> Window:
    passed, late = after.at - before.at, own.lateness_ms()
    return Window(
        at=at,
        seconds=shape.window_s,
        answered=int(own.ok().sum()),
        failed=int((~own.ok()).sum()),
        errors=dict(Counter(status for status in own.status if status != OK)),
        p50=_percentile(own, 50),
        p99=_percentile(own, 99),
        classes={
            kind: (_percentile(part, 50), _percentile(part, 99))
            for kind in sorted(set(own.kind))
            if (part := own.where(np.array(own.kind) == kind))
        },
        late_p99=float(np.percentile(late, 99)) if len(late) else float("nan"),
        entry=(after.entry - before.entry) / passed,
        lanes=(after.lanes - before.lanes) / passed,
        footprint=after.footprint,
    )


def _percentile(records: Records, share: float) -> float:
    latency = records.latency_ms()[records.ok()]
    return float(np.percentile(latency, share)) if len(latency) else float("nan")


def _told(window: Window) -> str:
    held = window.footprint
    return (
        f"{window.at / 60:6.2f} min  P50 {window.p50:5.1f}  P99 {window.p99:6.1f} ms  answered {window.answered:6}  "
        f"failed {window.failed}  exec/s {window.entry:6.2f} entry {window.lanes:6.2f} lanes  own "
        f"{held.server.own:6.1f} + {held.models.own:7.1f} MiB, PSS {held.server.pss + held.models.pss:.0f}, RSS "
        f"{held.server.rss + held.models.rss:.0f}  files "
        f"{held.server.descriptors} + {held.models.descriptors}  threads "
        f"{held.server.threads} + {held.models.threads}  shm {held.regions}: {held.shared:.1f} MiB  "
        f"late P99 {window.late_p99:.1f} ms"
    )


def main() -> None:
    """Run it and say whether everything held; exit code 1 when a line is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="in whole turns of the trace, at least three")
    parser.add_argument("--load", type=float, default=0.7, help="share of the maximum")
    parser.add_argument("--base", default="deploy.cpu.yaml", help="settings file")
    parser.add_argument("--window", type=float, default=30, help="seconds")
    parser.add_argument("--compared", type=int, default=10, help="windows that are compared: a turn of the trace")
    parser.add_argument("--maximum", type=float, default=25, help="seconds of the closed loop")
    parser.add_argument("--warm", type=float, default=60, help="seconds of load before the first window")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder for soak.md and soak.jsonl")
    options = parser.parse_args()
    turns = options.minutes * 60 / (options.window * options.compared)
    if turns < 3 or abs(turns - round(turns)) > 1e-6:
        parser.error(
            f"{options.minutes:g} minutes are {turns:.3g} turns of the trace ({options.compared} windows of "
            f"{options.window:g} s); whole turns, at least 3, are needed: change --minutes, --window or --compared"
        )
    shape = Shape(
        window_s=options.window,
        compared=options.compared,
        turns=round(turns),
        load=options.load,
        maximum_s=options.maximum,
        warm_s=options.warm,
    )
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(windows: Sequence[Window]) -> None:
        text = "".join(json.dumps(window.row()) + "\n" for window in windows)
        (options.out / "soak.jsonl").write_text(text, encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        built = repository(Path(folder), options.base)
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            outcome = soak(server, shape, Limits(), lambda line: print(line, flush=True), keep)
    command = f"python -m tests.measurements.soak --minutes {options.minutes:g} --load {options.load:g}"
    where = (
        f"{time.strftime('%Y-%m-%d')} · {os.cpu_count()} cores · Python {platform.python_version()} · {options.base}"
    )
    text = "\n".join([f"{where} · `{command}`", "", *outcome.text()])
    (options.out / "soak.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{'holds' if outcome.holds else 'FAILS'}")
    sys.exit(0 if outcome.holds else 1)


if __name__ == "__main__":
    main()
