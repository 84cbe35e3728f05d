"""What the command line of `bench` or `tune` said, put together."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from builders.bench.load import LoadSpec
    from builders.settings import DeploySettings
    from builders.source import EncoderSource


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

    def log(self, line: str) -> None:
        """Tell a line of progress."""
        self.say.print(escape(line), soft_wrap=True)
