"""`python -m builders`: build a model repository, verify it, serve it, change what is served."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from builders.bench.command import bench
from builders.candidate_command import canary
from builders.command_options import (
    CPU,
    PRODUCTION,
    Cache,
    Calibration,
    Config,
    Data,
    Key,
    ModelName,
    Offline,
    Only,
    Onnx,
    Skip,
    Url,
    about,
    build_all,
    build_for_start,
    cache_folder,
    chosen_models,
    console,
    say,
    tell_change,
)
from builders.errors import BuilderError
from builders.model_commands import check, matrix
from builders.names import make_command
from builders.serve_options import (
    CanaryDeadline,
    CanaryEvery,
    Events,
    HealthPort,
    ServeLogFormat,
    ServerKey,
    TlsCa,
    TlsCert,
    TlsClientCa,
    TlsClientCert,
    TlsClientKey,
    TlsKey,
    TraceRate,
    TracesUrl,
    access_of,
    key_for,
    supervision_of,
    tls_of,
    traces_of,
)
from builders.settings import DeploySettings, load_settings
from builders.supervise import supervise
from builders.tune.command import tune

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=__doc__)
app.command()(bench)
app.command()(tune)
app.command()(check)
app.command()(matrix)
app.command()(supervise)
app.command()(canary)


@app.command()
def render(config: Config = PRODUCTION, model: ModelName = None) -> None:
    """Write every config.pbtxt of the model repository from the settings."""
    from builders.render import bucket_plan, render_repository, write_configs
    from builders.source import open_source

    for settings in chosen_models(config, model):
        with about(settings) as tell:
            source = open_source(settings.model)
            notice = bucket_plan(settings, source).notice
            if notice:
                tell(notice)
            changed = write_configs(settings.repository, render_repository(settings, source), settings.name)
            for path in changed:
                tell(f"wrote {path}" if path.exists() else f"removed {path}")
            tell(f"{settings.repository}: {len(changed)} files changed")


@app.command()
def build(
    config: Config = CPU,
    model: ModelName = None,
    cache: Cache = None,
    only: Only = None,
    skip: Skip = None,
    onnx: Onnx = None,
    data: Data = None,
    calibration: Calibration = None,
    list_: Annotated[bool, typer.Option("--list", help="List the fusion steps and end.")] = False,
) -> None:
    """Export, fuse, convert, judge, compile and publish a new version of the model repository."""
    if list_:
        _list_steps()
        return
    from builders.build import BuildOptions

    options = BuildOptions(tuple(only or ()), tuple(skip or ()), onnx, data, calibration)
    # A graph is one model's.
    models = chosen_models(config, model) if onnx is None else (load_settings(config, model),)
    build_all(models, config, cache, options)


@app.command()
def verify(
    config: Config = CPU,
    model: ModelName = None,
    cache: Cache = None,
    only: Only = None,
    skip: Skip = None,
    onnx: Onnx = None,
    data: Data = None,
    calibration: Calibration = None,
    precision: Annotated[str | None, typer.Option(help="fp32, fp16, bf16 or int8; default: engine.precision.")] = None,
    target: Annotated[str | None, typer.Option(help="What the graph is fused for; default: the engine's.")] = None,
    find: Annotated[
        bool, typer.Option("--bisect", help="When the gate fails, find the step that makes it fail.")
    ] = False,
) -> None:
    """Run the accuracy gate on the graph that `build` would publish; publishes nothing, exit code 1 when it fails."""
    from builders.verification import run_verify
    from builders.verify.parity import describe

    settings = load_settings(config, model)
    with about(settings) as tell:
        checked = run_verify(
            settings,
            cache_folder(config, cache),
            tell,
            only=only or (),
            skip=skip or (),
            onnx=onnx,
            data=data,
            calibration=calibration,
            precision=precision,
            target=target,
            find=find,
        )
    lines = [*describe(checked.report.parity), *(metric.summary() for metric in checked.report.metrics)]
    if checked.bisect is not None:
        lines.append(checked.bisect.summary())
    screen = Console(highlight=False)
    for line in lines:
        screen.print(escape(line), soft_wrap=True)
    if not checked.report.passed:
        screen.print(f"[bold red]the gate fails:[/] {escape('; '.join(checked.report.reasons))}", soft_wrap=True)
        raise typer.Exit(1)
    screen.print("[green]the gate holds[/]")


@app.command()
def plan(
    config: Config = PRODUCTION,
    model: ModelName = None,
    cache: Cache = None,
    flavour: Annotated[str, typer.Option(help="auto, tensorrt or rtx (TensorRT-RTX builds without a GPU).")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for the plans and the layer listing.")] = Path("build/plans"),
    skip: Skip = None,
) -> None:
    """Compile a plan without publishing it, and say which fusions TensorRT made of it."""
    from builders.verification import run_plan

    settings = load_settings(config, model)
    with about(settings) as tell:
        for line in run_plan(settings, cache_folder(config, cache), tell, flavour, output, skip or ()):
            tell(line)


@app.command()
def serve(
    config: Config = CPU,
    model: ModelName = None,
    cache: Cache = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; default: $HTTP_PORT, else 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; default: $GRPC_PORT, else 8001.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of the Prometheus metrics; default: $METRICS_PORT, else 8002.")
    ] = None,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address to listen on.")] = "127.0.0.1",
    log: Annotated[Path | None, typer.Option(help="File for the server's whole log; default: a temporary one.")] = None,
    key: ServerKey = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    health_port: HealthPort = None,
    canary_every: CanaryEvery = 10.0,
    canary_deadline: CanaryDeadline = 30.0,
    events: Events = None,
    log_format: ServeLogFormat = "text",
    traces_url: TracesUrl = None,
    trace_rate: TraceRate = 0,
) -> None:
    """Build what is missing, start tritonserver with all models (or one), stop it on Ctrl-C."""
    from builders.ports import Ports
    from builders.serve import serve as run
    from builders.versions import record_start

    traces = traces_of(traces_url, trace_rate)
    given = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    ports = replace(Ports.from_environment(), **{name: port for name, port in given.items() if port is not None})
    built = build_for_start(config, model, cache)

    def record() -> None:
        for result in built:
            record_start(result.repository, result.name)

    with access_of(built[0].repository, key, tls_cert, tls_key, tls_client_ca) as access:
        code = run(
            built[0].repository,
            [triton for result in built for triton in result.models],
            ports,
            host,
            log_path=log,
            drain_models=[triton for result in built for triton in result.called_models],
            on_ready=record,
            access=access,
            supervision=supervision_of(canary_every, canary_deadline),
            health_port=health_port,
            events_path=events,
            as_json=log_format == "json",
            traces=traces,
        )
    raise typer.Exit(code)


@app.command()
def promote(
    version: Annotated[int, typer.Argument(min=1, help="Number of a published version.")],
    config: Config = CPU,
    model: ModelName = None,
    url: Url = "127.0.0.1:8001",
    key: Key = None,
    offline: Offline = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Unload the old version's lanes: saves memory, slows a rollback down.")
    ] = False,
    tls_ca: TlsCa = None,
    tls_client_cert: TlsClientCert = None,
    tls_client_key: TlsClientKey = None,
) -> None:
    """Let a published version answer instead of the served one, without a lost request."""
    from builders.versions import promote as run

    settings, tls = load_settings(config, model), tls_of(tls_ca, tls_client_cert, tls_client_key)
    secret = key_for(settings.repository, key)
    target = None if offline else url
    with about(settings) as tell:
        done = run(settings.repository, settings, version, target, tell, key=secret, tls=tls, keep_old=not drop_old)
        tell_change(done, offline, tell)


@app.command()
def rollback(
    config: Config = CPU,
    model: ModelName = None,
    url: Url = "127.0.0.1:8001",
    key: Key = None,
    offline: Offline = False,
    tls_ca: TlsCa = None,
    tls_client_cert: TlsClientCert = None,
    tls_client_key: TlsClientKey = None,
) -> None:
    """Let the version answer again that answered before the last promote."""
    from builders.versions import rollback as run

    settings, tls = load_settings(config, model), tls_of(tls_ca, tls_client_cert, tls_client_key)
    secret = key_for(settings.repository, key)
    with about(settings) as tell:
        done = run(settings.repository, settings, None if offline else url, tell, key=secret, tls=tls)
        tell_change(done, offline, tell)


@app.command()
def versions(config: Config = CPU, model: ModelName = None) -> None:
    """List the published versions, what they were made from and which one is served."""
    from builders.version_table import latency_table, version_table
    from builders.versions import list_versions

    screen, found = Console(highlight=False), False
    for settings in chosen_models(config, model):
        with about(settings) as tell:
            rows = list_versions(settings.repository, settings.name)
            if not rows:
                if settings.name:
                    tell(f"nothing is published yet; to do: {make_command('build-engines', settings.name)}")
                continue
        found = True
        if settings.name:
            screen.print(f"[bold]{settings.name}[/] ({settings.entry_model})")
        screen.print(version_table(rows))
        times = latency_table(rows)
        if times is not None:
            screen.print()
            screen.print(times)
        for row in rows:
            if row.problem:
                screen.print(f"[red]version {row.version}:[/] {escape(row.problem)}", soft_wrap=True)
    if not found:
        raise BuilderError("nothing is published yet", remedy="make build-engines")


@app.command()
def demo(config: Config = CPU, model: ModelName = None, cache: Cache = None) -> None:
    """Build, serve, send real requests of mixed length and priority, print the answers, stop."""
    from builders.demo import run_demo

    run_demo(build_for_start(config, model, cache), Console(highlight=False))


@app.command()
def profile(
    config: Config = CPU,
    model: ModelName = None,
    cache: Cache = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long the load lasts.")] = 15.0,
    clients: Annotated[int, typer.Option(min=1, max=4096, help="Requests in flight.")] = 32,
    output: Annotated[Path, typer.Option(help="Folder for profile.json and timeline.png.")] = Path("build/profile"),
) -> None:
    """Say where the time of a request goes, which kind of bottleneck it is and what to turn."""
    from builders.profile.run import lines_of, run_profile

    # With several models and none named, the first one: a profile is of one model's lanes.
    built = build_for_start(config, model, cache)[0]
    chosen = next(settings for settings in chosen_models(config, model) if settings.name == built.name)
    for line in lines_of(run_profile(built, chosen, output, say, seconds=seconds, clients=clients)):
        say(line)
    say(f"written: {output / 'profile.json'}, {output / 'timeline.png'}")


@app.command()
def settings() -> None:
    """Print every setting with its default, its limits and its meaning (Markdown)."""
    from builders.settings.reference import settings_table

    sys.stdout.write(settings_table(DeploySettings))


def _list_steps() -> None:
    from builders.fuse import list_steps

    for step in list_steps():
        say(f"{step.name:12} {step.about}")


def main() -> None:
    """Run the command line; a `BuilderError`, or a file that cannot be read or written, is one line and exit code 2."""
    try:
        app()
    except (BuilderError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
