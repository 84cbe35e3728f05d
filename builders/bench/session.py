"""What the command line of `bench` or `tune` said, put together."""

from __future__ import annotations

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

    @property
    def work(self) -> Path:
        """Folder of what is built for the servers, beside the settings file."""
        return self.config.resolve().parent / "build" / self.command / "work"

    def log(self, line: str) -> None:
        """Tell a line of progress."""
        self.say.print(escape(line), soft_wrap=True)
