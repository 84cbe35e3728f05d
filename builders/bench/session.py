"""What the command line of `bench` or `tune` said, put together."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from builders.errors import BuilderError

if TYPE_CHECKING:
    from builders.bench.load import LoadSpec
    from builders.bench.result import Journal
    from builders.settings import DeploySettings
    from builders.source import EncoderSource

#: Options that both commands have.
Rate = Annotated[
    float | None, typer.Option(min=0.01, help="Texts a second of the open loop; default: objectives.rate.")
]
LoadProcesses = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes of the load generator. Default: one for each four cores, up to 8."),
]


@dataclass(frozen=True)
class Session:
    """One run of a command that measures.

    Attributes:
        command: its name, "bench" or "tune".
        settings: the product's.
        source: its model.
        load: what every server is given.
        config: the settings file.
        cache: folder of exported graphs.
        output: folder of the results.
        screen: results, on stdout.
        say: progress, on stderr.
    """

    command: str
    settings: DeploySettings
    source: EncoderSource
    load: LoadSpec
    config: Path
    cache: Path
    output: Path
    screen: Console
    say: Console

    @classmethod
    def opened(
        cls,
        command: str,
        settings: DeploySettings,
        load: LoadSpec,
        config: Path,
        *,
        cache: Path | None,
        output: Path | None,
    ) -> Session:
        """A session with the model opened; folders that were not named lie below `build/` beside the settings file.

        Raises:
            BuilderError: the model cannot be opened.
        """
        from builders.source import open_source

        root = config.resolve().parent / "build"
        stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        return cls(
            command=command,
            settings=settings,
            source=open_source(settings.model),
            load=load,
            config=config,
            cache=cache or root / "cache",
            output=output or root / command / stamp,
            screen=Console(highlight=False),
            say=Console(stderr=True, highlight=False),
        )

    @property
    def work(self) -> Path:
        """Folder of what is built for the servers, beside the settings file."""
        return self.config.resolve().parent / "build" / self.command / "work"

    @property
    def model(self) -> str:
        """The product's model for the record: its folder's name and the hash of what it is."""
        return f"{self.source.folder.name} {self.source.sha256[:16]}"

    def journal(self) -> Journal:
        """A new `rows.jsonl` in the output folder, which is made: before any load, since it may not be writable.

        Raises:
            OSError: it is not.
        """
        from builders.bench.result import Journal

        return Journal(self.output / "rows.jsonl", self.log)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Holds what the measuring commands share beside the settings file: two at once would measure each other.

        Raises:
            BuilderError: another one runs.
        """
        path = self.config.resolve().parent / "build" / ".measuring.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file stays: removing it would let two hold a lock each, one on the removed file.
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BuilderError(
                    "another bench or tune of this settings file's folder runs", value=f"process {file.read().strip()}",
                    remedy="wait until it has ended: they would measure each other",
                ) from None  # fmt: skip
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def log(self, line: str) -> None:
        """Tell a line of progress."""
        self.say.print(escape(line), soft_wrap=True)


def need_packages(*names: str) -> None:
    """Refuses before anything starts, not after half an hour, what would lack a package at its end.

    Raises:
        BuilderError: one of these modules is not installed.
    """
    missing = [name for name in names if not _is_there(name)]
    if missing:
        from clients.load.page import BENCH_EXTRA  # not above: `--help` would load the clients

        raise BuilderError("packages are not installed", value=missing, remedy=f"{BENCH_EXTRA}, or use make")


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package it would be in
        return False
