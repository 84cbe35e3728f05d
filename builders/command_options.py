"""What the commands share: their options, where they print, and how they tell one model from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from builders.errors import BuilderError
from builders.names import other_models
from builders.settings import DeploySettings, choose, load_deployments

if TYPE_CHECKING:
    from builders.build import BuildOptions, BuildResult
    from builders.versions import Change

console = Console(stderr=True, highlight=False)

Config = Annotated[
    Path, typer.Option("--config", "-c", envvar="DEPLOY", help="Settings file: deploy.yaml, or one that extends it.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="Which model, where the settings list several.")
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
Only = Annotated[list[str] | None, typer.Option("--only", help="Fusion step to run alone; may be given several times.")]
Skip = Annotated[list[str] | None, typer.Option("--skip", help="Fusion step to leave out; may be given several times.")]
Onnx = Annotated[
    Path | None, typer.Option("--onnx", help="An ONNX graph with the lanes' contract that enters at fuse.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Your own texts for the task metric: CSV, TSV or JSONL, text,label or query,positive."),
]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", help="Your own texts for int8's scales, of a form that --data takes; not the same."),
]
CPU = Path("deploy.cpu.yaml")
PRODUCTION = Path("deploy.yaml")


def say(line: str) -> None:
    """Print one line of progress."""
    console.print(escape(line), soft_wrap=True)


def chosen_models(config: Path, name: str | None) -> tuple[DeploySettings, ...]:
    """The models that a command works on: all, or the named one.

    Says which entries of the repository are in no settings: they may be another deployment's, so nothing is done.

    Raises:
        SettingsError: as `load_deployments` and `choose`.
    """
    models = load_deployments(config)
    found = choose(config, models, name)
    repository = models[0].repository
    for other in other_models(repository, [model.name for model in models]):
        say(
            f"{other} is in {repository} but not in {config}: it is left alone and not loaded; "
            "to remove it, delete its folder, its lanes' folders and its .served file"
        )
    return found


@contextmanager
def about(settings: DeploySettings) -> Iterator[Callable[[str], None]]:
    """What tells the progress of one model; its lines, and an error, begin with the model's name if it has one."""
    name = settings.name
    try:
        yield (lambda line: say(f"{name}: {line}")) if name else say
    except BuilderError as error:
        if name:
            # In place: the error keeps its class and all that belongs to it.
            error.args = (f"model {name}: {error}", *error.args[1:])
        raise


def build_all(
    models: Sequence[DeploySettings], config: Path, cache: Path | None, options: BuildOptions | None = None
) -> list[BuildResult]:
    """Build one model after the other; the first that fails ends it, and those before it are published.

    Raises:
        BuilderError: as `build`.
    """
    from builders.build import build

    results = []
    for settings in models:
        with about(settings) as tell:
            results.append(build(settings, cache_folder(config, cache), tell, options))
    return results


def build_for_start(config: Path, name: str | None, cache: Path | None) -> list[BuildResult]:
    """Build what is missing and make sure that what is served can be.

    Raises:
        BuilderError: as `build` and `check_served`.
    """
    from builders.versions import check_served

    models = chosen_models(config, name)
    results = build_all(models, config, cache)
    for settings, result in zip(models, results, strict=True):
        with about(settings):
            check_served(settings.repository, name=settings.name, whole=(result.version,))
    return results


def cache_folder(config: Path, cache: Path | None) -> Path:
    """The given folder, or build/cache beside the settings file."""
    return cache or config.resolve().parent / "build" / "cache"


def control_key(text: str | None) -> tuple[str, str] | None:
    """Name and value of `--control-key`.

    Raises:
        BuilderError: one of them is missing.
    """
    if text is None:
        return None
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        # Not the text itself: it may hold the secret.
        raise BuilderError(
            "the control key has no name or no value", limit="NAME=VALUE", remedy="correct --control-key"
        )
    return name, value


def tell_change(change: Change, offline: bool, tell: Callable[[str], None]) -> None:
    """Print what a promote or a rollback did."""
    before = f" instead of {change.previous}" if change.previous not in (None, change.served) else ""
    if offline:
        tell(f"the next start serves version {change.served}{before}")
        return
    lanes = "lanes loaded" if change.lanes_loaded else "lanes were loaded already"
    tell(
        f"version {change.served} answers{before}: {change.seconds:.1f} s, {lanes}, "
        f"the entry changed over in {change.switch_seconds:.1f} s"
    )
