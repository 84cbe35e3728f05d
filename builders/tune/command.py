"""`python -m builders tune`: its options, and the order of things."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from builders.bench.session import LoadProcesses, Rate, Session, need_packages
from builders.errors import BuilderError
from builders.settings import DeploySettings, load_settings

if TYPE_CHECKING:
    from builders.bench.driver import Driver
    from builders.bench.load import BenchLoad
    from builders.bench.result import Journal, Row
    from builders.tune.outcome import Outcome
    from builders.tune.sweep import AxisMaker, Overrides
    from clients.load.run import Crew

AXES = ("window", "processes", "threads", "buckets")
#: Windows and batches of the reference case.
_GRID = "5/16, 10/32, 20/64, 30/64"
#: From starting a server to its first measured request, seconds; for the estimate alone.
_START_S = 15.0
_EXIT = "Exit status: 0 held; 1 past the stop line; 2 cannot be run; 3 no verdict: too noisy."


def tune(
    config: Annotated[Path, typer.Option("--config", "-c", envvar="DEPLOY", help="Settings file to tune.")] = Path(
        "deploy.cpu.yaml"
    ),
    model: Annotated[
        str | None, typer.Option("--model", help="Which model, where the settings file lists several.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of exported graphs; default: build/cache.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Axis to sweep, several times: {', '.join(AXES)}. Default: all.")
    ] = None,
    grid: Annotated[str, typer.Option(help="Windows in milliseconds and batches: WINDOW/BATCH, …")] = _GRID,
    texts: Annotated[
        Path | None,
        typer.Option(help="Your own texts, one a line: the load, and the sample for bucket edges (else not swept)."),
    ] = None,
    bucket_count: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=32, help="Buckets to choose edges for, several times. Default: as many as now, 2 more."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; each measures every setting, in turn.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Length of each open loop, seconds.")] = 20.0,
    closed_seconds: Annotated[float, typer.Option(min=0.2, help="Length of each closed loop, seconds.")] = 12.0,
    rate: Rate = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Clients of the closed loop. Default: as many as the objective lets wait (printed)."),
    ] = None,
    load_processes: LoadProcesses = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Lengths in tokens and their shares; default: your lines as they are, else bench's."),
    ] = None,
    noise: Annotated[
        float, typer.Option(min=0.01, help="Largest believable spread of the first row measured again, share of 1.")
    ] = 0.10,
    seed: Annotated[int, typer.Option(help="Of texts and arrival times.")] = 0,
    apply: Annotated[bool, typer.Option("--apply", help="Write the choice into the settings file.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of the result; default: build/tune/TIME.")] = None,
) -> None:
    """Sweep window, batch, processes, threads and buckets, and choose what is best within the stop line."""
    from builders.bench.driver import terminable
    from builders.bench.load import LoadSpec
    from builders.bench.rounds import own_processes
    from builders.tune.apply import check_target
    from builders.tune.axis import parse_grid
    from clients.errors import EncoderError
    from clients.load.texts import DEFAULT_MIX, Mix, read_corpus

    need_packages("jinja2", "psutil")
    settings, cells, names = load_settings(config, model), parse_grid(grid), _axes_named(only)
    if apply:
        check_target(config, settings.name)
    try:
        lengths = mix if mix is not None else "" if texts else DEFAULT_MIX
        if lengths:
            Mix.parse(lengths)
        corpus = tuple(line for line in read_corpus(texts) if line.strip()) if texts else None
        offered = settings.objectives.rate if rate is None else rate
        number, why = default_clients(settings, offered, [batch for _, batch in cells] if "window" in names else [])
        load = LoadSpec(
            rounds=rounds,
            closed_s=closed_seconds,
            open_s=seconds,
            rate=offered,
            clients=clients or number,
            processes=load_processes or own_processes(clients or number),
            mix=lengths,
            corpus=corpus,
            seed=seed,
        )
        setup = Session.opened("tune", settings, load, config, cache=cache, output=output)
        setup.log(f"{load.clients} clients in the closed loop: " + ("as --clients says" if clients else why))
        axes = _axes(setup, names, cells, tuple(bucket_count or ()))
        with terminable():
            code = _tune(setup, axes, noise, apply)
    except EncoderError as error:  # the load generator's own
        raise BuilderError(str(error)) from None
    raise typer.Exit(code)


def default_clients(settings: DeploySettings, rate: float, batches: Sequence[int]) -> tuple[int, str]:
    """How many clients the closed loop has where nobody says it, and why.

    By Little's law `rate * p99` requests are under way when the offered rate is answered as slowly as the objective
    allows. More of them would wait longer than the line, so what they gain is of no use to who holds it. Two of the
    file's own batches is the least, since fewer could not fill one while another is computed; two of the largest batch
    that is tried is the most, since more fill no batch better. A GPU waits for its host with so few: there each process
    has two of the largest batches.

    Args:
        settings: the file's.
        rate: texts a second of the open loop.
        batches: that are tried beside the file's own.
    """
    from builders.bench.load import full_load

    goal, own = settings.objectives, settings.entry.batch
    largest, waiting = max([own, *batches]), math.ceil(rate * goal.p99_ms / 1000)
    if settings.engine.kind == "tensorrt":
        return full_load(settings, largest), f"two batches of {largest} for each process: with fewer a GPU waits"
    number = min(max(waiting, 2 * own), 2 * largest)
    return number, (
        f"{waiting} texts are under way when {rate:g} a second take {goal.p99_ms:g} ms each, as long as the objective "
        f"allows; at least two of the file's batches ({2 * own}), at most two of the largest ({2 * largest})"
    )


def _axes_named(only: Sequence[str] | None) -> tuple[str, ...]:
    wrong = [name for name in only or () if name not in AXES]
    if wrong:
        raise BuilderError("no such axis", value=wrong, limit=", ".join(AXES), remedy="correct --only")
    return tuple(name for name in AXES if not only or name in only)


def _axes(
    setup: Session, names: Sequence[str], cells: Sequence[tuple[float, int]], counts: Sequence[int]
) -> list[AxisMaker]:
    """Makers of the axes, in order."""
    from builders.bench.rounds import cores
    from builders.tune import axis

    here = cores()
    makers: dict[str, AxisMaker] = {
        "window": lambda now: axis.window_axis(now, cells),
        "processes": lambda now: axis.processes_axis(now, here),
        "threads": lambda now: axis.threads_axis(now, here),
        "buckets": lambda now: _buckets(setup, now, counts),
    }
    return [makers[name] for name in names]


def _buckets(setup: Session, now: DeploySettings, counts: Sequence[int]) -> Any:
    """The axis of bucket edges; None without a sample of the user's own texts."""
    from builders.render import bucket_plan
    from builders.tune.axis import buckets_axis
    from builders.tune.buckets import best_edges, padded_tokens
    from clients.load.texts import TextSource

    corpus, pair = setup.load.corpus, setup.source.task.pair
    if corpus is None or pair == "required":
        why = "--texts gives no sample" if corpus is None else "the model reads pairs, of which a line is one half"
        setup.log(f"bucket edges are not swept: {why}")
        return None
    plan = bucket_plan(now, setup.source)
    used = [bucket.length for bucket in plan.buckets]
    lengths = [text.tokens for text in TextSource(corpus, setup.source.transformer).measured(list(corpus))]
    shown = [min(length, plan.max_tokens) for length in lengths]
    setup.log(
        f"{len(lengths)} texts, {sum(shown)} tokens; buckets {used} pad them to {padded_tokens(shown, used)} tokens"
    )
    found = []
    for count in counts or (len(used), len(used) + 2):
        # The longest bucket stays: it is what the model takes, whatever this sample holds.
        edges = best_edges(lengths, count, used[-1])
        setup.log(f"best of {count}: {edges.text()}, {edges.padded} tokens")
        found.append(edges.edges)
    return buckets_axis(now, used, found)


def _tune(setup: Session, axes: list[AxisMaker], noise: float, apply: bool) -> int:
    """The whole tuning; returns the exit status."""
    from builders.bench.load import make_load
    from builders.tune.outcome import axis_grid, judge_sweep, write_outcome
    from builders.tune.sweep import SweepSpec, run_sweep
    from clients.load.report import print_grid
    from clients.load.run import Crew

    load, limit = setup.load, setup.settings.objectives.p99_ms
    turn = load.closed_s + load.open_s + _START_S
    setup.log(
        f"about {turn:.0f} s a setting and round, {load.rounds} rounds; the first row is measured again at the end"
    )
    with setup.alone(), Crew(load.processes) as crew:
        turns = _Turns(setup, make_load(load, setup.source), crew, setup.journal())
        check = partial(_checked, setup)
        sweep = run_sweep(setup.settings, axes, check, turns, SweepSpec(load.rounds, limit), setup.log)
    for swept in sweep.swept:
        print_grid(setup.screen, axis_grid(swept, load, limit))
    outcome = judge_sweep(sweep, setup.settings, load, setup.config, noise)
    for line in (*(check.text() for check in outcome.checks), outcome.verdict):
        setup.screen.print(escape(line), soft_wrap=True)
    _say_what_else(setup, outcome)
    path = setup.output / "tune.json"
    write_outcome(path, sweep, outcome, load, setup.config, limit)
    if outcome.changes and outcome.code == 0:
        _write(setup, outcome, apply)
    setup.log(f"result: {path}")
    return outcome.code


def _say_what_else(setup: Session, outcome: Outcome) -> None:
    """What follows from the choice."""
    setup.log(f"the first row measured again differs by {100 * outcome.spread:.1f} %")
    batch = outcome.changes.get("entry.batch")
    if batch and batch[1] < batch[0]:
        setup.screen.print(
            f"clients may then send {batch[1]} texts a request at most: EncoderClient(url, batch={batch[1]})",
            soft_wrap=True,
        )
    if "buckets" in outcome.changes:
        setup.screen.print("other buckets are another version: build it and promote it", soft_wrap=True)


def _write(setup: Session, outcome: Outcome, apply: bool) -> None:
    from builders.tune.apply import apply_changes

    if not apply:
        setup.screen.print(f"--apply writes it into {escape(str(setup.config))}", soft_wrap=True)
        return
    apply_changes(setup.config, {name: new for name, (_, new) in outcome.items}, setup.settings.name)
    setup.screen.print(f"wrote {escape(str(setup.config))}", soft_wrap=True)


def _checked(setup: Session, label: str, overrides: Overrides) -> DeploySettings:
    """The file's settings with overrides; without the bench's patience, since that is how they would be written."""
    from builders.bench.product import Variant, overridden

    return overridden(setup.settings, Variant(label, "", overrides), setup.work)


def _driver(setup: Session, label: str, overrides: Overrides) -> Driver:
    """The product with overrides, and with queue timeouts that nothing runs into: a slow row is to be measured."""
    from builders.bench.product import PATIENT, ProductDriver, Variant, merge

    variant = Variant(label, "this product", merge(PATIENT, overrides))
    return ProductDriver(setup.settings, variant, setup.work, setup.cache, setup.log, share=True)


@dataclass
class _Turns:
    """Measures settings, each on a server started for its turn: others that idle beside it would take memory."""

    setup: Session
    load: BenchLoad
    crew: Crew
    journal: Journal
    drivers: dict[str, Driver] = field(default_factory=dict)

    def __call__(self, label: str, overrides: Overrides, round_: int) -> tuple[Row, Row | None]:
        """See `Measure`."""
        from builders.bench.result import row_of
        from builders.bench.rounds import gentle, measure, started

        driver = self.drivers.get(label)
        if driver is None:
            driver = self.drivers[label] = _driver(self.setup, label, overrides)
        closed, opened, console = self.load.closed[round_], self.load.opened[round_], self.setup.say
        with started(driver, console) as target:
            one = partial(measure, driver, target, crew=self.crew, console=console, round_=round_)
            one(gentle(opened), loop="first")
            full = row_of(one(closed, loop="closed", clients=self.load.clients, warm_s=self.load.warm_s))
            self.journal.add(full)
            rate = self.setup.load.rate
            if full.throughput < rate:
                self.setup.log(f"{label}: {full.throughput:.1f} texts/s at most; {rate:g} are not offered to it")
                return full, None
            at_rate = row_of(one(opened, loop="open"))
            self.journal.add(at_rate)
            return full, at_rate


tune.__doc__ = f"{tune.__doc__}\n\n{_EXIT}"
