"""The measurements: every server in every round, in turn, so that a machine that gets slower is slower for all."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.markup import escape

from builders.bench.driver import BenchError, Driver, cpu_of
from builders.bench.load import BenchLoad
from builders.errors import BuilderError
from clients.load.metrics import GPU, MetricsSampler, Reading
from clients.load.plan import Plan
from clients.load.records import Records
from clients.load.run import Crew, shown_progress
from clients.load.summary import Summary, summarise
from clients.load.target import Target

Loop = Literal["first", "closed", "open"]
_IDLE_LIMIT = 0.03
#: Of the container's own control group: microseconds of CPU time in a period, and the period.
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Triton asks the GPU for its utilisation this often, seconds: what it says before is of the time before the load.
_GPU_EVERY_S = 2.0


@dataclass(frozen=True)
class Measurement:
    """One load on one server.

    Attributes:
        driver: name of the server.
        round: from 0; -1: the pair that warms the two of a paired run up.
        loop: "first": the first seconds of a server that was just started, gently; "closed": maximum throughput;
            "open": latency at a rate.
        summary, records: of the load.
        cpu_share: CPU time of the server's processes, share of all cores over the load's time.
        cpu_ms: that CPU time for each answered request, milliseconds; 0 when none was.
        others_share: likewise of all other servers of the bench, which should idle.
        gpu: utilisation of the server's GPUs, share of 1; None without one.
        readings: Triton's metrics meanwhile; empty for others.
        ended: how the server had ended by itself, with the end of its log; empty when it still ran.
    """

    driver: str
    round: int
    loop: Loop
    summary: Summary
    records: Records
    cpu_share: float
    cpu_ms: float = 0.0
    others_share: float = 0.0
    gpu: float | None = None
    readings: tuple[Reading, ...] = ()
    ended: str = ""


def cores() -> int:
    """Cores this process may use: those it may run on, or a container's CPU quota where that is less."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        here = min(here, max(1, math.ceil(int(quota) / int(period))))
    return here


def own_processes(clients: int) -> int:
    """Processes of a load generator with so many clients where nobody says it: a quarter of the cores, 1 to 8."""
    return min(clients, max(1, min(8, cores() // 4)))


def machine_speed(seconds: float = 0.3) -> float:
    """How fast one core is right now: SHA-256 of 64 KiB, times a second, the best of three stretches.

    Rounds and stored runs are only comparable while this is about the same.
    """
    block = bytes(65_536)
    best = 0.0
    for _ in range(3):
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds / 3:
            hashlib.sha256(block).digest()
            done += 1
        best = max(best, done / elapsed)
    return best


def run_rounds(
    drivers: Sequence[Driver],
    load: BenchLoad,
    console: Console,
    *,
    keep: bool = True,
    flat: Collection[str] = (),
    record: Callable[[Measurement], None] | None = None,
) -> tuple[list[Measurement], list[float]]:
    """Closed and open loop on every server in every round; the order moves on by one each round.

    Args:
        drivers: the servers; names differ.
        load: what each gets.
        console: where progress goes.
        keep: start all once and leave them running; otherwise each is started for its turn, and its first seconds are
            measured too.
        flat: names of servers whose requests carry no priority.
        record: told each measurement as soon as there is one.

    Returns:
        The measurements, and the machine's speed before each server's turn.

    Raises:
        BuilderError: a server did not start. All are stopped, whatever happens.
    """
    if len({driver.name for driver in drivers}) < len(drivers):
        raise BenchError("two servers of the bench have the same name", value=[driver.name for driver in drivers])
    measured, speeds = list[Measurement](), list[float]()
    with Crew(load.processes) as crew, ExitStack() as running:
        targets: dict[str, Target] = {}
        if keep:
            for driver in drivers:
                targets[driver.name] = running.enter_context(started(driver, console))
        for number in range(len(load.opened)):
            turn = number % len(drivers)
            for driver in (*drivers[turn:], *drivers[:turn]):
                speeds.append(machine_speed())
                with nullcontext(targets[driver.name]) if keep else started(driver, console) as target:
                    others = [other for other in drivers if other is not driver]
                    run = _Turn(driver, others, target, load, number, driver.name in flat, console, crew)
                    for one in run.all(first=not keep):
                        measured.append(one)
                        if record is not None:
                            record(one)
    return measured, speeds


@contextmanager
def started(driver: Driver, console: Console) -> Iterator[Target]:
    """A server that runs inside the block and is stopped after it.

    Raises:
        BuilderError: it did not start; it begins with the server's name.
    """
    began = time.perf_counter()
    console.print(f"starting {escape(driver.name)}: {escape(driver.about)}", soft_wrap=True)
    try:
        try:
            target = driver.start()
        except BuilderError as error:
            # In place: the error keeps its class and all that belongs to it.
            error.args = (f"{driver.name}: {error}", *error.args[1:])
            raise
        console.print(f"{escape(driver.name)} answers after {time.perf_counter() - began:.1f} s")
        yield target
    finally:
        driver.stop()


@dataclass(frozen=True)
class _Turn:
    """One server's turn in a round."""

    driver: Driver
    others: Sequence[Driver]
    target: Target
    load: BenchLoad
    round: int
    flat: bool
    console: Console
    crew: Crew

    def all(self, first: bool) -> Iterator[Measurement]:
        closed, opened = self.load.closed[self.round], self.load.opened[self.round]
        if first:
            yield self.one("first", gentle(opened), 0)
        yield self.one("closed", closed, self.load.clients)
        yield self.one("open", opened, 0)

    def one(self, loop: Loop, plan: Plan, clients: int) -> Measurement:
        return measure(
            self.driver,
            self.target,
            _flat(plan) if self.flat else plan,
            self.crew,
            self.console,
            clients=clients,
            loop=loop,
            round_=self.round,
            warm_s=self.load.warm_s if clients else 0.0,
            others=self.others,
        )


def measure(
    driver: Driver,
    target: Target,
    plan: Plan,
    crew: Crew,
    console: Console,
    *,
    loop: Loop,
    clients: int = 0,
    round_: int = 0,
    warm_s: float = 0.0,
    others: Sequence[Driver] = (),
) -> Measurement:
    """One load on a running server, with the CPU time of its processes.

    Args:
        driver: the server.
        target: how to call it.
        plan: the load.
        crew: the generator.
        console: where progress goes.
        loop: for the record.
        clients: of a closed loop; 0 for an open one.
        round_: for the record.
        warm_s: first seconds that do not count.
        others: servers that run beside and should idle.
    """
    pids = [driver.pid, *(other.pid for other in others)]
    sampler = MetricsSampler(driver.metrics_url) if driver.metrics_url else None
    label = f"round {round_ + 1}, {driver.name}, {loop} loop"
    with sampler or nullcontext(), shown_progress(label, plan.seconds, console) as tell:
        began = time.perf_counter()
        before = [cpu_of(pid).seconds for pid in pids]
        records = crew.run(target, plan, clients, tell)
        wall = time.perf_counter() - began
        used = [cpu_of(pid).seconds - value for pid, value in zip(pids, before, strict=True)]
    # The generator connects within `wall`; the server's time is of the load alone.
    seconds = min(wall, max(max(records.done), 1e-3))
    readings = sampler.since(records.start) if sampler else ()
    answered, ended = int(records.ok().sum()), driver.ended() or ""
    if ended:
        console.print(f"[bold red]{escape(f'{driver.name}: {ended}')}[/]", soft_wrap=True)
    return Measurement(
        driver=driver.name,
        round=round_,
        loop=loop,
        summary=summarise(records, plan, clients=clients, warm_s=warm_s),
        records=records,
        cpu_share=max(0.0, used[0]) / (seconds * cores()),
        cpu_ms=1000 * max(0.0, used[0]) / answered if answered else 0.0,
        others_share=max(0.0, sum(used[1:])) / (wall * cores()),
        gpu=gpu_share(readings, driver.gpus, after_s=warm_s + _GPU_EVERY_S),
        readings=readings,
        ended=ended,
    )


def gpu_share(readings: Sequence[Reading], count: int, after_s: float = 0.0) -> float | None:
    """Mean utilisation of the `count` busiest GPUs, share of 1; None where Triton sees none.

    Triton tells of every GPU of the machine, and not which are whose: the others do not count.

    Args:
        readings: during a load.
        count: GPUs of the server.
        after_s: what was read before does not count, seconds, unless nothing was read later.
    """
    seen: dict[str, list[float]] = {}
    for reading in [one for one in readings if one.at >= after_s] or readings:
        for name, value in reading.values.get(GPU, {}).items():
            seen.setdefault(name, []).append(value)
    busiest = sorted((sum(values) / len(values) for values in seen.values()), reverse=True)[:count]
    return sum(busiest) / len(busiest) if busiest else None


def noise_of(measured: Sequence[Measurement], speeds: Sequence[float]) -> list[str]:
    """What made the figures less certain: servers that did not idle, a machine whose speed moved, a late generator.

    And what makes latencies no figures of a server: failed requests, since percentiles are those of the answered ones,
    a server that died, and a rate above what it can do, since they then grow for as long as the loop lasts.
    """
    notes = []
    busy = max((one.others_share for one in measured), default=0.0)
    if busy > _IDLE_LIMIT:
        notes.append(f"servers that should idle took up to {100 * busy:.0f} % of the cores")
    if speeds and max(speeds) > 1.15 * min(speeds):
        notes.append(
            f"the machine's speed moved by {100 * (max(speeds) / min(speeds) - 1):.0f} % between the servers' turns; "
            "differences below that may be the machine's"
        )
    late = [one for one in measured if not one.summary.valid]
    if late:
        worst = max(one.summary.late_p99_ms for one in late)
        notes.append(
            f"the load generator was late, or the limit, in {len(late)} of {len(measured)} loads "
            f"(late by up to {worst:.0f} ms, P99)"
        )
    for name in dict.fromkeys(one.driver for one in measured):
        own = [one.records for one in measured if one.driver == name]
        if failed := sum(int((~records.ok()).sum()) for records in own):
            sent = sum(map(len, own))
            notes.append(f"{name}: {failed} of {sent} requests failed; percentiles are those of the answered ones")
        if ended := next((one for one in measured if one.driver == name and one.ended), None):
            notes.append(f"{name}: {ended.ended} (round {ended.round + 1}, {ended.loop} loop)")
    if past := [name for name in dict.fromkeys(one.driver for one in measured) if _is_past(measured, name)]:
        notes.append(
            f"past their maximum at the rate: {', '.join(past)}; their latencies are those of a queue that grows while "
            "the loop lasts: compare them at a lower --rate"
        )
    return notes


def _is_past(measured: Sequence[Measurement], driver: str) -> bool:
    """Whether the open loop's rate is above what a server did in the closed loop."""
    done = [one.summary.throughput for one in measured if one.driver == driver and one.loop == "closed"]
    rates = [one.summary.offered for one in measured if one.driver == driver and one.loop == "open"]
    return bool(done and rates) and median(done) < max(rates)


def _flat(plan: Plan) -> Plan:
    """The plan without priorities; classes keep their names."""
    return replace(plan, requests=tuple(replace(request, priority=0) for request in plan.requests))


def gentle(plan: Plan, count: int = 20, rate: float = 5.0) -> Plan:
    """The first requests of a plan, evenly spaced and slowly, so that only the server's start shows."""
    chosen = plan.requests[:count]
    spaced = tuple(replace(request, at=number / rate) for number, request in enumerate(chosen))
    return Plan(spaced, len(spaced) / rate, plan.exact)
