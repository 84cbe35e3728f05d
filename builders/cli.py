"""`python -m builders`: render, build, serve, demo, settings."""

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
    from builders.build import BuildResult

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=__doc__)
console = Console(stderr=True, highlight=False)

Config = Annotated[
    Path, typer.Option("--config", "-c", envvar="DEPLOY", help="Settings file: deploy.yaml, or one that extends it.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Folder that keeps exported graphs; default: build/cache beside the settings file.")
]
CPU = Path("deploy.cpu.yaml")
PRODUCTION = Path("deploy.yaml")


@app.command()
def render(config: Config = PRODUCTION) -> None:
    """Write every config.pbtxt of the model repository from the settings."""
    from builders.render import bucket_plan, render_configs, write_configs
    from builders.source import open_source

    settings = load_settings(config)
    source = open_source(settings.model)
    notice = bucket_plan(settings, source).notice
    if notice:
        _say(notice)
    changed = write_configs(settings.repository, render_configs(settings, source))
    for path in changed:
        _say(f"wrote {path}" if path.exists() else f"removed {path}")
    _say(f"{settings.repository}: {len(changed)} files changed")


@app.command()
def build(config: Config = CPU, cache: Cache = None) -> None:
    """Export the model and publish a version of the model repository."""
    _build(load_settings(config), config, cache)


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
    from builders.ports import Ports
    from builders.render import ENTRY
    from builders.serve import serve as run

    given = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    ports = replace(Ports.from_environment(), **{name: port for name, port in given.items() if port is not None})
    built = _build(load_settings(config), config, cache)
    raise typer.Exit(run(built.repository, built.models, ports, host, log_path=log, drain_model=ENTRY))


@app.command()
def demo(config: Config = CPU, cache: Cache = None) -> None:
    """Build, serve, send real requests of mixed length and priority, print the answers, stop."""
    from builders.demo import run_demo

    built = _build(load_settings(config), config, cache)
    run_demo(built, Console(highlight=False))


@app.command()
def settings() -> None:
    """Print every setting with its default, its limits and its meaning (Markdown)."""
    from builders.settings.reference import settings_table

    sys.stdout.write(settings_table(DeploySettings))


def _build(settings: DeploySettings, config: Path, cache: Path | None) -> BuildResult:
    from builders.build import build as run

    return run(settings, cache or config.resolve().parent / "build" / "cache", _say)


def _say(line: str) -> None:
    console.print(escape(line), soft_wrap=True)


def main() -> None:
    """Run the command line; a `BuilderError`, or a file that cannot be read or written, is one line and exit code 2."""
    try:
        app()
    except (BuilderError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
