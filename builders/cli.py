"""`python -m builders`: build a model repository, verify it, serve it, change what is served."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from builders.errors import BuilderError
from builders.settings import DeploySettings, load_settings

if TYPE_CHECKING:
    from builders.build import BuildOptions, BuildResult
    from builders.versions import Change

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=__doc__)
console = Console(stderr=True, highlight=False)

Config = Annotated[
    Path, typer.Option("--config", "-c", envvar="DEPLOY", help="Settings file: deploy.yaml, or one that extends it.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Folder that keeps exported graphs; default: build/cache beside the settings file.")
]
Url = Annotated[str, typer.Option(envvar="GRPC_URL", help="gRPC address of the running server.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--control-key", envvar="CONTROL_KEY", metavar="NAME=VALUE", help="Key of a restricted model control API."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="No server runs: change what the next start serves.")]
CPU = Path("deploy.cpu.yaml")
PRODUCTION = Path("deploy.yaml")


@app.command()
def render(config: Config = PRODUCTION) -> None:
    """Write every config.pbtxt of the model repository from the settings."""
    from builders.render import bucket_plan, render_repository, write_configs
    from builders.source import open_source

    settings = load_settings(config)
    source = open_source(settings.model)
    notice = bucket_plan(settings, source).notice
    if notice:
        _say(notice)
    changed = write_configs(settings.repository, render_repository(settings, source))
    for path in changed:
        _say(f"wrote {path}" if path.exists() else f"removed {path}")
    _say(f"{settings.repository}: {len(changed)} files changed")


Only = Annotated[list[str] | None, typer.Option("--only", help="Fusion step to run alone; may be given several times.")]
Skip = Annotated[list[str] | None, typer.Option("--skip", help="Fusion step to leave out; may be given several times.")]
Onnx = Annotated[
    Path | None, typer.Option("--onnx", help="An ONNX graph with the lanes' contract that enters at fuse.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Your own texts for the task metric: CSV, TSV or JSONL, text,label or query,positive."),
]


@app.command()
def build(
    config: Config = CPU,
    cache: Cache = None,
    only: Only = None,
    skip: Skip = None,
    onnx: Onnx = None,
    data: Data = None,
    list_: Annotated[bool, typer.Option("--list", help="List the fusion steps and end.")] = False,
) -> None:
    """Export, fuse, convert, judge, compile and publish a new version of the model repository."""
    if list_:
        _list_steps()
        return
    from builders.build import BuildOptions

    options = BuildOptions(tuple(only or ()), tuple(skip or ()), onnx, data)
    _build(load_settings(config), config, cache, options)


@app.command()
def verify(
    config: Config = CPU,
    cache: Cache = None,
    only: Only = None,
    skip: Skip = None,
    onnx: Onnx = None,
    data: Data = None,
    precision: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; default: engine.precision.")] = None,
    target: Annotated[str | None, typer.Option(help="What the graph is fused for; default: the engine's.")] = None,
    find: Annotated[
        bool, typer.Option("--bisect", help="When the gate fails, find the step that makes it fail.")
    ] = False,
) -> None:
    """Run the accuracy gate on the graph that `build` would publish; publishes nothing, exit code 1 when it fails."""
    from builders.verification import run_verify
    from builders.verify.parity import describe

    checked = run_verify(
        load_settings(config),
        _cache(config, cache),
        _say,
        only=only or (),
        skip=skip or (),
        onnx=onnx,
        data=data,
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
    cache: Cache = None,
    flavour: Annotated[str, typer.Option(help="auto, tensorrt or rtx (TensorRT-RTX builds without a GPU).")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for the plans and the layer listing.")] = Path("build/plans"),
    skip: Skip = None,
) -> None:
    """Compile a plan without publishing it, and say which fusions TensorRT made of it."""
    from builders.verification import run_plan

    for line in run_plan(load_settings(config), _cache(config, cache), _say, flavour, output, skip or ()):
        _say(line)


@app.command()
def serve(
    config: Config = CPU,
    cache: Cache = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port; default: $HTTP_PORT, else 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; default: $GRPC_PORT, else 8001.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of the Prometheus metrics; default: $METRICS_PORT, else 8002.")
    ] = None,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address to listen on.")] = "127.0.0.1",
    log: Annotated[Path | None, typer.Option(help="File for the server's whole log; default: a temporary one.")] = None,
) -> None:
    """Build what is missing, start tritonserver, stop it on Ctrl-C."""
    from builders.manifest import ENTRY
    from builders.ports import Ports
    from builders.serve import serve as run
    from builders.versions import check_served, record_start

    given = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    ports = replace(Ports.from_environment(), **{name: port for name, port in given.items() if port is not None})
    built = _build(load_settings(config), config, cache)
    check_served(built.repository)
    code = run(
        built.repository,
        built.models,
        ports,
        host,
        log_path=log,
        drain_model=ENTRY,
        on_ready=lambda: record_start(built.repository),
    )
    raise typer.Exit(code)


@app.command()
def promote(
    version: Annotated[int, typer.Argument(min=1, help="Number of a published version.")],
    config: Config = CPU,
    url: Url = "127.0.0.1:8001",
    control_key: Key = None,
    offline: Offline = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="Unload the old version's lanes: saves memory, slows a rollback down.")
    ] = False,
) -> None:
    """Let a published version answer instead of the served one, without a lost request."""
    from builders.versions import promote as run

    settings, key = load_settings(config), _control_key(control_key)
    target = None if offline else url
    _tell(run(settings.repository, settings, version, target, _say, key=key, keep_old=not drop_old), offline)


@app.command()
def rollback(
    config: Config = CPU, url: Url = "127.0.0.1:8001", control_key: Key = None, offline: Offline = False
) -> None:
    """Let the version answer again that answered before the last promote."""
    from builders.versions import rollback as run

    settings, key = load_settings(config), _control_key(control_key)
    _tell(run(settings.repository, settings, None if offline else url, _say, key=key), offline)


@app.command()
def versions(config: Config = CPU) -> None:
    """List the published versions, what they were made from and which one is served."""
    from builders.version_table import version_table
    from builders.versions import list_versions

    rows = list_versions(load_settings(config).repository)
    screen = Console(highlight=False)
    if not rows:
        raise BuilderError("nothing is published yet", remedy="make build-engines")
    screen.print(version_table(rows))
    for row in rows:
        if row.problem:
            screen.print(f"[red]version {row.version}:[/] {escape(row.problem)}", soft_wrap=True)


@app.command()
def demo(config: Config = CPU, cache: Cache = None) -> None:
    """Build, serve, send real requests of mixed length and priority, print the answers, stop."""
    from builders.demo import run_demo
    from builders.versions import check_served

    built = _build(load_settings(config), config, cache)
    check_served(built.repository)
    run_demo(built, Console(highlight=False))


@app.command()
def settings() -> None:
    """Print every setting with its default, its limits and its meaning (Markdown)."""
    from builders.settings.reference import settings_table

    sys.stdout.write(settings_table(DeploySettings))


def _build(
    settings: DeploySettings, config: Path, cache: Path | None, options: BuildOptions | None = None
) -> BuildResult:
    from builders.build import build as run

    return run(settings, _cache(config, cache), _say, options)


def _cache(config: Path, cache: Path | None) -> Path:
    return cache or config.resolve().parent / "build" / "cache"


def _list_steps() -> None:
    from builders.fuse import list_steps

    for step in list_steps():
        _say(f"{step.name:12} {step.about}")


def _control_key(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        # Not the text itself: it may hold the secret.
        raise BuilderError(
            "the control key has no name or no value", limit="NAME=VALUE", remedy="correct --control-key"
        )
    return name, value


def _tell(change: Change, offline: bool) -> None:
    before = f" instead of {change.previous}" if change.previous not in (None, change.served) else ""
    if offline:
        _say(f"the next start serves version {change.served}{before}")
        return
    lanes = "lanes loaded" if change.lanes_loaded else "lanes were loaded already"
    _say(
        f"version {change.served} answers{before}: {change.seconds:.1f} s, {lanes}, "
        f"the entry changed over in {change.switch_seconds:.1f} s"
    )


def _say(line: str) -> None:
    console.print(escape(line), soft_wrap=True)


def main() -> None:
    """Run the command line; a `BuilderError`, or a file that cannot be read or written, is one line and exit code 2."""
    try:
        app()
    except (BuilderError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
