"""Command line of the client: `python -m clients COMMAND`. Each command is a module of `clients.commands`."""

from __future__ import annotations

import typer

from clients.commands.bench import bench
from clients.commands.common import EXIT_HELP
from clients.commands.encode import encode
from clients.commands.status import status
from clients.commands.tasks import answer, classify, rerank, similarity, tag
from clients.door.command import PASS_ON, door

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Client of the encoder service."""


for command in (encode, classify, rerank, similarity, tag, answer, status, bench):
    app.command(epilog=EXIT_HELP)(command)
app.command(context_settings=PASS_ON, add_help_option=False)(door)
