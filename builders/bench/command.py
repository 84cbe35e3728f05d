"""`python -m builders bench`: its options, and the order of things."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from builders.bench.session import Session
from builders.errors import BuilderError
from builders.settings import DeploySettings, load_settings

if TYPE_CHECKING:
    from builders.bench.driver import Driver
    from builders.bench.load import LoadSpec
    from builders.bench.result import BenchResult
    from builders.bench.rounds import Measurement
    from clients.load.page import Grid

PRODUCT = "product"
_EXIT = (
    "Exit status: 0 held; 1 past the stop line, or slower than the other run; 2 cannot be run; 3 no verdict: too noisy."
)
_NO_VERDICT = 3


def bench(
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="DEPLOY", help="Settings file of the product.")
    ] = Path("deploy.cpu.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", help="Which model, where the settings file lists several.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of exported graphs; default: build/cache.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each measures every server, in turn.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each open loop, seconds.")] = 30.0,
    closed_seconds: Annotated[float, typer.Option(min=1, help="Length of each closed loop, seconds.")] = 20.0,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Texts a second of the open loop; default: objectives.rate.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients of the closed loop.")] = 32,
    load_processes: Annotated[int, typer.Option(min=1, max=64, help="Processes of the load generator.")] = 1,
    mix: Annotated[str, typer.Option(help="Lengths in tokens and their shares.")] = "60% 20, 20% 100, 15% 220, 5% 480",
    texts: Annotated[Path | None, typer.Option(help="Your own texts, one a line, to cut the lengths from.")] = None,
    seed: Annotated[int, typer.Option(help="Of texts and arrival times.")] = 0,
    peer_venv: Annotated[
        list[Path] | None,
        typer.Option(help="Environment that holds infinity-emb or LitServe; may be given several times."),
    ] = None,
    peer_batch: Annotated[
        list[int] | None, typer.Option(help="Largest batch of the peers; may be given several times. Default: 4.")
    ] = None,
    naive: Annotated[bool, typer.Option("--naive/--no-naive", help="Measure the naive server as well.")] = True,
    ladder: Annotated[
        bool,
        typer.Option("--ladder/--no-ladder", help="Then each technique switched on in turn: the before/after table."),
    ] = True,
    ladder_rounds: Annotated[int, typer.Option(min=1, help="Rounds of that table.")] = 1,
    against: Annotated[
        Path | None, typer.Option(help="result.json of an earlier run: fail if this one is slower than noise explains.")
    ] = None,
    paired: Annotated[
        Path | None,
        typer.Option(help="Another settings file, or the root of another checkout: compare in many short pairs, only."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=6, help="Pairs of --paired.")] = 20,
    pair_seconds: Annotated[float, typer.Option(min=1, help="Length of each load of a pair, seconds.")] = 5.0,
    output: Annotated[Path | None, typer.Option(help="Folder of the results; default: build/bench/TIME.")] = None,
) -> None:
    """Measure the product, a naive server and installed peers side by side, and hold the product to its stop line."""
    from builders.bench.driver import terminable
    from builders.bench.load import LoadSpec
    from clients.errors import EncoderError
    from clients.load.texts import Mix, read_corpus

    settings = load_settings(config, model)
    try:
        Mix.parse(mix)
        corpus = tuple(read_corpus(texts)) if texts else None
        load = LoadSpec(
            rounds=rounds,
            closed_s=closed_seconds,
            open_s=seconds,
            rate=settings.objectives.rate if rate is None else rate,
            clients=clients,
            processes=load_processes,
            mix=mix,
            corpus=corpus,
            seed=seed,
        )
        setup = Session.opened("bench", settings, load, config, cache=cache, output=output)
        venvs, batches, ladders = tuple(peer_venv or ()), tuple(peer_batch or (4,)), ladder_rounds if ladder else 0
        with terminable():
            if paired is not None:
                code = _paired(setup, paired, pairs, pair_seconds)
            else:
                code = _side_by_side(setup, venvs, batches, naive, ladders, against)
    except EncoderError as error:  # the load generator's own
        raise BuilderError(str(error)) from None
    raise typer.Exit(code)


def _side_by_side(
    setup: Session,
    venvs: tuple[Path, ...],
    batches: tuple[int, ...],
    naive: bool,
    ladder_rounds: int,
    stored: Path | None,
) -> int:
    """The whole bench; returns the exit status."""
    from builders.bench import regression
    from builders.bench.report import by_class, by_length, side_by_side, write_report
    from builders.bench.result import read_result, this_machine_in_words, write_result
    from builders.bench.stopline import check_line
    from clients.load.selftest import measure_floor

    earlier = read_result(stored) if stored else None
    if earlier is not None:  # before minutes of load
        regression.check_same_load(earlier, setup.load, this_machine_in_words())
    floor = measure_floor(setup.load.processes).text()
    setup.log(floor)
    drivers = _drivers(setup, venvs, batches, naive)
    result, measured = _measured(setup, drivers, setup.load, keep=True)
    grids = [side_by_side(result), by_class(result), by_length(result)]
    _show(setup, result, grids)
    write_result(setup.output / "result.json", result)
    parts = [("side by side", result, grids, measured)]
    if ladder_rounds:
        parts.append(_ladder(setup, ladder_rounds, naive))
    checks = check_line(result, PRODUCT, setup.settings.objectives)
    lines = [check.text() for check in checks]
    slower = unsure = False
    if earlier is not None:
        verdict = regression.against(earlier, result, PRODUCT)
        lines += [one.text() for one in verdict.comparisons]
        slower, unsure = verdict.slower, not verdict.comparable
        if unsure:
            lines.append(
                f"no verdict: the machine is {verdict.speed:.2f} times as fast as in the stored run; run both again"
            )
    about = (f"{result.date} · {', '.join(f'{k} {v}' for k, v in result.machine.items())} · {setup.config}", floor)
    page = write_report(setup.output, f"bench of {setup.source.folder.name}", (*about, *lines), parts)
    for line in lines:
        setup.screen.print(escape(line), soft_wrap=True)
    setup.log(f"results: {page}")
    if slower or any(check.held == "passed over" for check in checks):
        return 1
    # A GPU objective that cannot be judged is no fault of the run; a P99 is.
    unsure = unsure or checks[0].held == "not judged"
    return _NO_VERDICT if unsure else 0


def _drivers(setup: Session, venvs: tuple[Path, ...], batches: tuple[int, ...], naive: bool) -> list[Driver]:
    from builders.bench.driver import BenchError
    from builders.bench.naive import NaiveDriver
    from builders.bench.peers import infinity, installed, litserve

    drivers: list[Driver] = [NaiveDriver(setup.source)] if naive else []
    drivers.append(_product(setup, PRODUCT, setup.settings, patient=False))
    for venv in venvs:
        found: list[Driver] = []
        for batch in batches:
            if installed(venv, "infinity_emb"):
                found += [infinity(venv, setup.source, engine, batch, setup.work) for engine in ("torch", "optimum")]
            if installed(venv, "litserve"):
                found.append(litserve(venv, setup.source, batch))
        if not found:
            raise BenchError(
                "the environment holds no peer", value=str(venv), limit="infinity_emb or litserve in its bin folder"
            )
        drivers += found
    if not venvs:
        setup.log("no peers: --peer-venv names an environment that holds infinity-emb or LitServe")
    return drivers


def _product(setup: Session, name: str, settings: DeploySettings, *, patient: bool) -> Driver:
    """The product as its settings say; `patient`: with queue timeouts that nothing runs into."""
    from builders.bench.product import PATIENT, ProductDriver, Variant

    engine = settings.engine
    about = f"this product, {engine.kind}, {engine.precision}, {settings.entry.processes} processes, gRPC"
    variant = Variant(name, about, PATIENT if patient else {})
    return ProductDriver(settings, variant, setup.work, setup.cache, setup.log)


def _measured(
    setup: Session, drivers: list[Driver], load: LoadSpec, *, keep: bool, flat: frozenset[str] = frozenset()
) -> tuple[BenchResult, list[Measurement]]:
    from builders.bench.load import make_load
    from builders.bench.result import make_result
    from builders.bench.rounds import noise_of, run_rounds

    measured, speeds = run_rounds(drivers, make_load(load, setup.source), setup.say, keep=keep, flat=flat)
    result = make_result(
        measured,
        config=setup.config,
        load=load,
        drivers={driver.name: driver.about for driver in drivers},
        speeds=speeds,
        notes=noise_of(measured, speeds),
    )
    return result, measured


def _ladder(setup: Session, rounds: int, naive: bool) -> tuple[str, BenchResult, list[Grid], list[Measurement]]:
    from builders.bench.ladder import ladder
    from builders.bench.naive import NaiveDriver
    from builders.bench.product import ProductDriver
    from builders.bench.report import ladder_grid
    from builders.bench.result import write_result
    from builders.bucket import BucketPlan
    from builders.fuse import list_steps
    from builders.render import bucket_plan

    plan: BucketPlan = bucket_plan(setup.settings, setup.source)
    rungs = ladder(setup.settings, plan, tuple(step.name for step in list_steps()))
    drivers: list[Driver] = [NaiveDriver(setup.source)] if naive else []
    drivers += [ProductDriver(setup.settings, rung.variant, setup.work, setup.cache, setup.log) for rung in rungs]
    flat = frozenset(rung.variant.name for rung in rungs if not rung.priorities)
    result, measured = _measured(setup, drivers, replace(setup.load, rounds=rounds), keep=False, flat=flat)
    grids = [ladder_grid(result)]
    _show(setup, result, grids)
    write_result(setup.output / "ladder.json", result)
    return "each technique switched on in turn", result, grids, measured


def _paired(setup: Session, other: Path, pairs: int, seconds: float) -> int:
    """B is this checkout and --config; A is the other. Fails when B is slower."""
    from builders.bench.product import CheckoutDriver, question_for
    from builders.bench.regression import PairSpec, is_checkout, run_pairs
    from clients.load.target import Target

    if is_checkout(other):
        # Both by the same command, so that nothing but the code differs.
        root = Path(__file__).resolve().parents[2]
        config = setup.config.resolve()
        relative = config.relative_to(root) if config.is_relative_to(root) else config
        target = Target("A", model=setup.settings.entry_model, question=question_for(setup.source))
        first: Driver = CheckoutDriver("A", other, relative, target)
        second: Driver = CheckoutDriver("B", root, relative, target)
    else:
        # Patient: requests that time out would make the slower one look faster.
        first = _product(setup, "A", load_settings(other, setup.settings.name or None), patient=True)
        second = _product(setup, "B", setup.settings, patient=True)
    comparisons, measured = run_pairs(first, second, setup.source, setup.load, PairSpec(pairs, seconds), setup.say)
    setup.screen.print(f"A: {escape(str(other))}; B: {escape(str(setup.config))}; {pairs} pairs", soft_wrap=True)
    for comparison in comparisons:
        setup.screen.print(escape(comparison.text()), soft_wrap=True)
    late = sum(not one.summary.valid for one in measured)
    if late:
        setup.screen.print(f"[yellow]the load generator was late in {late} of {len(measured)} loads[/]")
    return int(any(one.verdict == "slower" for one in comparisons))


def _show(setup: Session, result: BenchResult, grids: list[Grid]) -> None:
    from clients.load.report import print_grid

    for grid in grids:
        print_grid(setup.screen, grid)
    for note in result.notes:
        setup.screen.print(f"[bold yellow]{escape(note)}[/]", soft_wrap=True)


bench.__doc__ = f"{bench.__doc__}\n\n{_EXIT}"
