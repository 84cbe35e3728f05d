"""`python -m builders bench`: its options, and the order of things."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from builders.bench.session import LoadProcesses, Rate, Session, need_packages
from builders.errors import BuilderError
from builders.settings import DeploySettings, load_settings

if TYPE_CHECKING:
    from builders.bench.driver import Driver
    from builders.bench.ladder import Rung
    from builders.bench.load import LoadSpec
    from builders.bench.product import ProductDriver
    from builders.bench.result import BenchResult, Journal
    from builders.bench.rounds import Measurement
    from clients.load.page import Grid
    from clients.load.selftest import Floor

PRODUCT = "product"
_EXIT = (
    "Exit status: 0 held; 1 past the stop line, or slower than the other run; 2 cannot be run; 3 no verdict: too noisy."
)
_NO_VERDICT = 3
#: More of all cores than this taken before the first server starts is said, share of 1.
_BUSY = 0.15
#: From this share of the generator's own maximum on, it may be what is measured.
_NEAR_GENERATOR = 0.7
#: Title, result, tables, measurements.
Part = tuple[str, "BenchResult", "list[Grid]", "list[Measurement]"]


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
    rate: Rate = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Clients of the closed loop. Default: 32; with a GPU two batches an entry process."),
    ] = None,
    load_processes: LoadProcesses = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Lengths in tokens and their shares, '75% 20, 25% 200'; default: that of `clients bench`."),
    ] = None,
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
    from builders.bench.load import LoadSpec, full_load
    from builders.bench.rounds import own_processes
    from clients.errors import EncoderError
    from clients.load.texts import DEFAULT_MIX, Mix, read_corpus

    if against is not None and paired is not None:
        raise BuilderError("--against and --paired are two comparisons", remedy="make one after the other")
    need_packages("jinja2", "matplotlib", "psutil")
    settings, mix = load_settings(config, model), DEFAULT_MIX if mix is None else mix
    try:
        Mix.parse(mix)
        corpus = tuple(read_corpus(texts)) if texts else None
        number = clients or full_load(settings)
        load = LoadSpec(
            rounds=rounds,
            closed_s=closed_seconds,
            open_s=seconds,
            rate=settings.objectives.rate if rate is None else rate,
            clients=number,
            processes=load_processes or own_processes(number),
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
    from builders.bench.driver import busy_share
    from builders.bench.report import by_class, by_length, servers, side_by_side, write_report
    from builders.bench.result import read_result, this_machine_in_words, write_result
    from clients.load.selftest import measure_floor

    earlier = read_result(stored) if stored else None
    if earlier is not None:  # before minutes of load
        regression.check_stored(earlier, PRODUCT, setup.load, this_machine_in_words())
    with setup.alone():
        drivers = _drivers(setup, venvs, batches, naive)
        journal, busy = setup.journal(), busy_share()
        floor = measure_floor(setup.load.processes)
        setup.log(floor.text())
        result, measured = _measured(setup, drivers, setup.load, journal, keep=True)
        result = replace(result, notes=(*result.notes, *_doubts(result, floor, busy)))
        grids = [side_by_side(result), by_class(result), by_length(result)]
        _show(setup, result, grids)
        lines, code = _judged(setup, result, earlier)
        words = ", ".join(f"{name} {value}" for name, value in result.machine.items())
        head = (f"{result.date} · {words} · {setup.config}", floor.text(), *lines)
        parts: list[Part] = [("side by side", result, [*grids, servers(result)], measured)]

        def report() -> None:
            page = write_report(setup.output, f"bench of {setup.source.folder.name}", head, parts)
            setup.log(f"results: {page}")

        try:
            write_result(setup.output / "result.json", result)
            report()
            if ladder_rounds:  # whatever becomes of it, the rest is there
                parts.append(_ladder(setup, ladder_rounds, naive, journal))
                report()
        finally:
            for line in lines:
                setup.screen.print(escape(line), soft_wrap=True)
    return code


def _judged(setup: Session, result: BenchResult, earlier: BenchResult | None) -> tuple[list[str], int]:
    """The stop line and the comparison with a stored run: lines for people, and the exit status."""
    from builders.bench import regression
    from builders.bench.result import differences
    from builders.bench.stopline import check_line

    checks = check_line(result, PRODUCT, setup.settings.objectives)
    lines = [check.text() for check in checks]
    slower = unsure = False
    if earlier is not None:
        verdict = regression.against(earlier, result, PRODUCT)
        lines += [one.text() for one in verdict.comparisons]
        slower, unsure = verdict.slower, not verdict.comparable
        lines += [*verdict.left_out, *(f"no verdict: {doubt}" for doubt in verdict.doubts)]
        if others := differences(earlier, result):
            lines.append(f"not as in the stored run: {'; '.join(others)}")
    if slower or any(check.held == "passed over" for check in checks):
        return lines, 1
    # A GPU objective that cannot be judged is no fault of the run; a P99 is.
    unsure = unsure or checks[0].held == "not judged"
    return lines, _NO_VERDICT if unsure else 0


def _doubts(result: BenchResult, floor: Floor, busy: float) -> list[str]:
    """What makes figures less certain that only this command knows."""
    found = []
    if busy > _BUSY:
        found.append(f"{100 * busy:.0f} % of the machine were taken before the first server started, by something else")
    for name in result.drivers:
        best = max(result.throughputs(name), default=0.0)
        if best > _NEAR_GENERATOR * floor.max_rate:
            found.append(
                f"{name}: {best:.0f} texts/s are near the {floor.max_rate:.0f} that the load generator can do; the "
                "server may be able to do more: use more --load-processes"
            )
    return found


def _drivers(setup: Session, venvs: tuple[Path, ...], batches: tuple[int, ...], naive: bool) -> list[Driver]:
    from builders.bench.driver import BenchError
    from builders.bench.peers import infinity, installed, litserve

    drivers: list[Driver] = [_naive(setup)] if naive else []
    drivers.append(_product(setup, PRODUCT, setup.settings, patient=False))
    for venv in venvs:
        found: list[Driver] = []
        for batch in batches:
            if installed(venv, "infinity_emb"):
                found += [
                    infinity(venv, setup.source, engine, batch, setup.work, setup.output)
                    for engine in ("torch", "optimum")
                ]
            if installed(venv, "litserve"):
                found.append(litserve(venv, setup.source, batch, setup.output))
        if not found:
            raise BenchError(
                "the environment holds no peer", value=str(venv), limit="infinity_emb or litserve in its bin folder"
            )
        drivers += found
    if venvs and setup.settings.engine.kind == "tensorrt":
        setup.log("the peers compute on the CPU, the product on a GPU: that compares machines")
    if not venvs:
        setup.log("no peers: --peer-venv names an environment that holds infinity-emb or LitServe")
    return drivers


def _naive(setup: Session) -> Driver:
    from builders.bench.naive import NaiveDriver

    return NaiveDriver(setup.source, setup.output, gpu=setup.settings.engine.kind == "tensorrt")


def _product(setup: Session, name: str, settings: DeploySettings, *, patient: bool) -> Driver:
    """The product as its settings say; `patient`: with queue timeouts that nothing runs into."""
    from builders.bench.product import PATIENT, ProductDriver, Variant

    engine = settings.engine
    about = f"this product, {engine.kind}, {engine.precision}, {settings.entry.processes} processes, gRPC"
    variant = Variant(name, about, PATIENT if patient else {})
    return ProductDriver(settings, variant, setup.work, setup.cache, setup.log, logs=setup.output)


def _measured(
    setup: Session,
    drivers: list[Driver],
    load: LoadSpec,
    journal: Journal,
    *,
    keep: bool,
    flat: frozenset[str] = frozenset(),
) -> tuple[BenchResult, list[Measurement]]:
    from builders.bench.load import make_load
    from builders.bench.result import row_of
    from builders.bench.rounds import run_rounds

    measured, speeds = run_rounds(
        drivers,
        make_load(load, setup.source),
        setup.say,
        keep=keep,
        flat=flat,
        record=lambda one: journal.add(row_of(one)),
    )
    return _result(setup, drivers, load, measured, speeds), measured


def _result(
    setup: Session, drivers: list[Driver], load: LoadSpec, measured: list[Measurement], speeds: list[float]
) -> BenchResult:
    from builders.bench.result import make_result
    from builders.bench.rounds import noise_of

    return make_result(
        measured,
        config=setup.config,
        load=load,
        drivers={driver.name: driver.about for driver in drivers},
        speeds=speeds,
        notes=noise_of(measured, speeds),
        model=setup.model,
        settings=setup.settings.model_dump(mode="json", exclude={"repository"}),
    )


def _ladder(setup: Session, rounds: int, naive: bool, journal: Journal) -> Part:
    from builders.bench.ladder import ladder, not_in_table
    from builders.bench.report import ladder_grid, not_shown, servers
    from builders.bench.result import write_result
    from builders.bucket import BucketPlan
    from builders.fuse import list_steps
    from builders.render import bucket_plan

    plan: BucketPlan = bucket_plan(setup.settings, setup.source)
    rungs = ladder(setup.settings, plan, tuple(step.name for step in list_steps()))
    flat = frozenset(rung.variant.name for rung in rungs if not rung.priorities)
    setup.work.mkdir(parents=True, exist_ok=True)
    for leftover in setup.work.glob("ladder-*"):  # of a bench that was killed
        shutil.rmtree(leftover)
    # Folders of their own: the files of a cold row are no longer what the builders published.
    with TemporaryDirectory(dir=setup.work, prefix="ladder-") as folder:
        drivers: list[Driver] = [_naive(setup)] if naive else []
        drivers += [rung_driver(setup, rung, Path(folder)) for rung in rungs]
        load = replace(setup.load, rounds=rounds)
        result, measured = _measured(setup, drivers, load, journal, keep=False, flat=flat)
    grids = [ladder_grid(result), servers(result), not_shown(not_in_table(setup.settings))]
    _show(setup, result, grids[:1])
    for grid in grids[1:]:  # words, which a table would push to the right
        for name, words in grid.rows:
            setup.screen.print(escape(f"{name}: {words}"), soft_wrap=True)
    write_result(setup.output / "ladder.json", result)
    return "each technique switched on in turn", result, grids, measured


def rung_driver(setup: Session, rung: Rung, folder: Path) -> ProductDriver:
    """The server of a row of the table of techniques; its files are below `folder`."""
    from builders.bench.cold import leave_cold
    from builders.bench.product import ProductDriver

    # Apart: the row that warm-up is switched on in has the settings of a cold one, and would find its files.
    work = folder / ("cold" if rung.cold else "warm")
    change = leave_cold if rung.cold else None
    return ProductDriver(setup.settings, rung.variant, work, setup.cache, setup.log, change=change, logs=setup.output)


def _paired(setup: Session, other: Path, pairs: int, seconds: float) -> int:
    """B is this checkout and --config; A is the other. Fails when B is slower."""
    from builders.bench.product import CheckoutDriver, question_for
    from builders.bench.regression import PairSpec, is_checkout, pair_doubts, run_pairs, worse_without_figures
    from builders.bench.result import row_of, write_result
    from clients.load.target import Target

    if is_checkout(other):
        # Both by the same command, so that nothing but the code differs.
        root = Path(__file__).resolve().parents[2]
        config = setup.config.resolve()
        relative = config.relative_to(root) if config.is_relative_to(root) else config
        target = Target("A", model=setup.settings.entry_model, question=question_for(setup.source))
        name = setup.settings.name
        first: Driver = CheckoutDriver("A", other, relative, setup.work, target, name, setup.output)
        second: Driver = CheckoutDriver("B", root, relative, setup.work, target, name, setup.output)
    else:
        # Patient: requests that time out would make the slower one look faster.
        first = _product(setup, "A", load_settings(other, setup.settings.name or None), patient=True)
        second = _product(setup, "B", setup.settings, patient=True)
    with setup.alone():
        journal, size = setup.journal(), PairSpec(pairs, seconds)
        comparisons, measured = run_pairs(
            first, second, setup.source, setup.load, size, setup.say, lambda one: journal.add(row_of(one))
        )
    worse = worse_without_figures(measured, first.name, second.name)
    doubts = pair_doubts(measured, first.name, second.name)
    failed = worse is not None or any(one.verdict == "slower" for one in comparisons)
    done = len({one.round for one in measured if one.round >= 0})
    lines = [f"A: {other}; B: {setup.config}; {done} of {pairs} pairs", *(one.text() for one in comparisons)]
    if not doubts and not any("CPU" in one.figure for one in comparisons):
        lines.append("CPU time a text is not compared: the turns are too short for the system's clock")
    if worse is not None:
        lines.append(worse)
    else:
        lines += doubts if failed else [f"no verdict: {doubt}" for doubt in doubts]
    for line in lines:
        setup.screen.print(escape(line), soft_wrap=True)
    load = replace(setup.load, rounds=pairs, closed_s=seconds, open_s=seconds)
    result = _result(setup, [first, second], load, measured, [])
    _show(setup, result, [])
    write_result(setup.output / "paired.json", result)
    setup.log(f"results: {setup.output / 'paired.json'}")
    if failed:
        return 1
    return _NO_VERDICT if doubts else 0


def _show(setup: Session, result: BenchResult, grids: list[Grid]) -> None:
    from clients.load.report import print_grid

    for grid in grids:
        print_grid(setup.screen, grid)
    for note in result.notes:
        setup.screen.print(f"[bold yellow]{escape(note)}[/]", soft_wrap=True)


bench.__doc__ = f"{bench.__doc__}\n\n{_EXIT}"
