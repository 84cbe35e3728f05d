"""`python -m builders`: render, build, serve, demo, settings."""

from __future__ import annotations

import sys
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
    http_port: Annotated[int, typer.Option(envvar="HTTP_PORT", help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(envvar="GRPC_PORT", help="gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(envvar="METRICS_PORT", help="Port of the Prometheus metrics.")] = 8002,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Build what is missing, start tritonserver, stop it on Ctrl-C."""
    from builders.ports import Ports
    from builders.serve import serve as run

    built = _build(load_settings(config), config, cache)
    raise typer.Exit(run(built.repository, built.models, Ports(http_port, grpc_port, metrics_port), host))


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
    """Run the command line; a `BuilderError` is one line and exit code 2."""
    try:
        app()
    except BuilderError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
