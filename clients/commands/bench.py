"""`python -m clients bench`: load on one server, and what came of it."""

from __future__ import annotations

import datetime
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from clients.commands.common import (
    DEFAULT_URL,
    ClientCertificate,
    ClientKey,
    Header,
    RootCertificate,
    Token,
    errors_to_exit_codes,
    named_headers,
    tls_of,
)
from clients.connection import key_headers
from clients.errors import EncoderError, InvalidInput

if TYPE_CHECKING:
    from clients.load.plan import Plan
    from clients.load.target import Target
    from clients.load.texts import TextSource

_INVALID, _INTERRUPTED = 6, 130
_RATE, _SECONDS = 20.0, 30.0
#: The options that say more about each kind of load.
_SHAPED_BY = {
    "--rate": ("--seconds", "--arrivals", "--class", "--mix"),
    "--profile": ("--arrivals", "--class", "--mix"),
    "--trace": ("--speed",),
    "--clients": ("--seconds", "--class", "--mix"),
}
_CLOSED_TEXTS = 2000


class Arrivals(StrEnum):
    """--arrivals."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Protocol(StrEnum):
    """--protocol."""

    TRITON = "triton"
    OPENAI = "openai"


def bench(
    url: Annotated[
        str, typer.Argument(help="host:port of Triton's gRPC endpoint, or http[s]://... of an OpenAI-like one.")
    ] = DEFAULT_URL,
    protocol: Annotated[Protocol, typer.Option(help="How the server is called.")] = Protocol.TRITON,
    model: Annotated[str, typer.Option(help="Name of the entry model.")] = "encode",
    question: Annotated[
        str, typer.Option(help="First text of each pair, for a model of pairs; the load's texts are the second.")
    ] = "",
    rate: Annotated[float | None, typer.Option(help="Open loop: texts a second. Default: 20.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Length of the run with --rate or --clients, seconds. Default: 30.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Open loop over time: RATE[-RATE]xSECONDS, ...: '20x30, 20-60x60, 200x2'.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay JSON lines: offset_s, text or tokens, priority, class.")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="Of the replay: 2 takes half of the time. Default: 1.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop of so many clients instead: the maximum throughput.")
    ] = None,
    arrivals: Annotated[Arrivals | None, typer.Option(help="Spacing of the open loop. Default: poisson.")] = None,
    class_: Annotated[
        list[str] | None,
        typer.Option("--class", help="NAME[/PRIORITY] SHARE% [: MIX], several times: 'interactive 70%'."),
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Lengths in tokens. Default: '60% 20, 20% 100, 15% 220, 5% 480', or --texts.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Your own texts, one a line. Default: Python's documentation.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json of the model, to measure lengths; else by words.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Of the generator. Default: 2, or 1 on one core.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Longest time for one request, seconds.")] = 60.0,
    late_limit: Annotated[
        float, typer.Option(help="A P99 of the generator's own delay above this makes the run invalid, ms.")
    ] = 10.0,
    warm: Annotated[float, typer.Option(min=0, help="First seconds that do not count.")] = 0.0,
    metrics: Annotated[
        str | None, typer.Option(help="Triton's metrics page, sampled meanwhile: http://127.0.0.1:8002/metrics.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for requests.jsonl, summary.json, plots and report.html.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="First measure the generator itself, some seconds, on a null server.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of times, texts and classes.")] = 0,
    token: Token = None,
    header: Header = None,
    root_certificate: RootCertificate = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Put load on a server and report latency from the scheduled time, throughput and errors.

    Exit status 6: the generator itself was the bottleneck, so that the figures are not the server's. When every request
    fails it is that of the most frequent error. Ctrl-C ends the load and shows what was measured until then (130).
    """
    from clients.load.target import Target
    from clients.load.texts import TextSource, read_corpus

    with errors_to_exit_codes():
        source = TextSource(read_corpus(texts) if texts else None, tokenizer)
        shape = _Shape(rate, seconds, profile, trace, speed, clients, arrivals, tuple(class_ or ()), mix, seed)
        shape.check()
        plan = shape.plan(source)
        if warm >= plan.seconds:
            raise InvalidInput("--warm leaves nothing of the run", value=warm, limit=f"below its {plan.seconds:g} s")
        keys = key_headers("grpc" if protocol is Protocol.TRITON else "http", named_headers(header), token, None)
        tls = tls_of(root_certificate, client_certificate, client_key)
        _run(
            Target(url, protocol.value, model, deadline, question, keys, tls),
            plan,
            shape,
            processes=processes,
            late_limit=late_limit,
            warm=warm,
            metrics=metrics,
            output=output,
            self_test=self_test,
        )


@dataclass(frozen=True)
class _Shape:
    """The options that say what is sent when."""

    rate: float | None
    seconds: float | None
    profile: str | None
    trace: Path | None
    speed: float | None
    clients: int | None
    arrivals: Arrivals | None
    classes: tuple[str, ...]
    mix: str | None
    seed: int

    def check(self) -> None:
        """Refuses what would be left out without a word.

        Raises:
            InvalidInput: options contradict each other.
        """
        loads = {"--rate": self.rate, "--profile": self.profile, "--trace": self.trace, "--clients": self.clients}
        named = [name for name, value in loads.items() if value is not None]
        if len(named) > 1:
            raise InvalidInput("more than one load", value=named, limit="one of --rate, --profile, --trace, --clients")
        load = named[0] if named else "--rate"
        others = {
            "--seconds": self.seconds,
            "--speed": self.speed,
            "--arrivals": self.arrivals,
            "--class": self.classes or None,
            "--mix": self.mix,
        }
        idle = [name for name, value in others.items() if value is not None and name not in _SHAPED_BY[load]]
        if idle:
            raise InvalidInput(f"{load} has no use for it", value=idle, limit=f"with it {', '.join(_SHAPED_BY[load])}")
        if self.rate is not None and not self.rate > 0:
            raise InvalidInput("--rate", value=self.rate, limit="above 0 texts a second")

    def plan(self, source: TextSource) -> Plan:
        """The requests.

        Raises:
            InvalidInput: an option cannot be read.
        """
        from clients.load.plan import Segment, closed_plan, open_plan, parse_classes, parse_profile, read_trace
        from clients.load.texts import Mix

        classes = parse_classes(self.classes) if self.classes else ()
        lengths = Mix.parse(self.mix) if self.mix else None
        if self.trace is not None:
            speed = 1.0 if self.speed is None else self.speed
            return read_trace(self.trace, source, speed=speed, seed=self.seed)
        seconds = _SECONDS if self.seconds is None else self.seconds
        if self.clients is not None:
            return closed_plan(source, _CLOSED_TEXTS, seconds, classes, lengths, seed=self.seed)
        rate = self.rate or _RATE
        segments = parse_profile(self.profile) if self.profile is not None else (Segment(rate, rate, seconds),)
        arrivals = self.arrivals or Arrivals.POISSON
        return open_plan(source, segments, classes, lengths, arrivals=arrivals.value, seed=self.seed)

    def text(self) -> str:
        """For people."""
        if self.trace is not None:
            return f"replay of {self.trace}"
        if self.clients is not None:
            return f"closed loop of {self.clients} clients"
        spaced = (self.arrivals or Arrivals.POISSON).value
        rate = self.profile or f"{self.rate or _RATE:g}/s for {self.seconds or _SECONDS:g} s"
        return f"open loop, {spaced}, {rate}"


def _run(
    target: Target,
    plan: Plan,
    shape: _Shape,
    *,
    processes: int | None,
    late_limit: float,
    warm: float,
    metrics: str | None,
    output: Path | None,
    self_test: bool,
) -> None:
    """Sends the plan, shows and writes what came of it."""
    from clients.load.metrics import MetricsSampler
    from clients.load.report import LoadRun, prepare_folder, print_run, write_run
    from clients.load.run import Interrupted, LoadOptions, default_processes, run_load, shown_progress
    from clients.load.selftest import measure_floor
    from clients.load.summary import summarise

    screen, said = Console(highlight=False), Console(stderr=True, highlight=False)
    workers = processes or default_processes()
    if shape.clients is not None:
        workers = min(workers, shape.clients)
    options = LoadOptions(workers, shape.clients or 0)
    sampler = MetricsSampler(metrics) if metrics else None
    if output is not None:
        prepare_folder(output)
    floor = (measure_floor(workers).text(),) if self_test else ()
    for line in floor:
        screen.print(line, soft_wrap=True)
    interrupted = False
    with sampler or nullcontext(), shown_progress(shape.text(), plan.seconds, said) as tell:
        try:
            records = run_load(target, plan, options, tell)
        except Interrupted as cut:
            records, interrupted = cut.records, True
    try:
        summary = summarise(records, plan, clients=options.clients, late_limit_ms=late_limit, warm_s=warm)
    except InvalidInput:
        if not interrupted:
            raise
        said.print("interrupted before anything was measured")
        raise typer.Exit(_INTERRUPTED) from None
    readings = sampler.since(records.start) if sampler else ()
    run = LoadRun(f"load on {target.url}{', interrupted' * interrupted}", records, summary, readings)
    print_run(screen, run)
    if metrics and not run.readings:
        said.print(f"[yellow]no metrics at {escape(metrics)}[/]")
    if output is not None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = (f"{shape.text()}; {workers} processes of the generator", f"{when} · {platform.machine()}", *floor)
        said.print(f"report: {escape(str(write_run(output, run, about)))}", soft_wrap=True)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)
    if summary.overall.failed == summary.overall.requests:
        kinds = {kind.__name__: kind for kind in EncoderError.__subclasses__()}
        failed = kinds.get(max(summary.errors, key=lambda kind: summary.errors[kind]), EncoderError)
        raise failed("every request failed", value=dict(summary.errors), url=target.url)
    if not summary.valid:
        raise typer.Exit(_INVALID)
