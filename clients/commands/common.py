"""What the commands share: their options, the client they call with, how errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from clients.client import EncoderClient
from clients.connection import Tls
from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerUnavailable,
)
from clients.options import CallOptions
from clients.retry import RetryPolicy

_EXIT_CODES: dict[type[EncoderError], int] = {
    InvalidInput: 2,
    QueueTimeout: 3,
    DeadlineExceeded: 3,
    Overloaded: 4,
    ServerUnavailable: 5,
}
EXIT_HELP = (
    "Exit status: 0 done; 2 invalid input or usage; 3 a timeout or the deadline passed; 4 the server is overloaded; "
    "5 the server is unavailable; 1 anything else (141: whoever read the output closed it)."
)
_CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell shows for a program that a closed pipe ended


class PriorityOption(StrEnum):
    """--priority."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


class TruncateOption(StrEnum):
    """--truncate."""

    END = "end"
    START = "start"
    ERROR = "error"
    CHUNK = "chunk"


Url = Annotated[
    str, typer.Option(help="host:port of Triton's gRPC endpoint, or http[s]://host:port of its HTTP endpoint.")
]
Model = Annotated[str, typer.Option(help="Name of the entry model.")]
Batch = Annotated[int, typer.Option(help="Most texts of one request.")]
Retries = Annotated[int, typer.Option(help="Most times that a request refused by a full server is sent again.")]
Token = Annotated[
    str | None, typer.Option(envvar="ENCODER_TOKEN", help="Sent as a bearer token; better in the environment.")
]
Header = Annotated[list[str] | None, typer.Option(metavar="NAME:VALUE", help="A header of every request.")]
RootCertificate = Annotated[
    Path | None, typer.Option(help="PEM file that vouches for the server; the connection is encrypted.")
]
ClientCertificate = Annotated[
    Path | None, typer.Option(help="PEM file with this client's own certificate chain, for a server that asks for one.")
]
ClientKey = Annotated[Path | None, typer.Option(help="PEM file with the private key of --client-certificate.")]
PriorityChoice = Annotated[PriorityOption | None, typer.Option(help="Left out: background.")]
Timeout = Annotated[float | None, typer.Option(help="Longest wait of a request in the server's queue, seconds.")]
Deadline = Annotated[float | None, typer.Option(help="Longest time for everything, seconds.")]
TruncateChoice = Annotated[
    TruncateOption,
    typer.Option(help="Text that is too long: cut its end or its start off, refuse it, or read it whole in chunks."),
]
Overlap = Annotated[int | None, typer.Option(help="Tokens that neighbouring chunks share; left out: the model's own.")]
TextArguments = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; a single - reads stdin.")]
File = Annotated[Path | None, typer.Option(help="Read texts from this UTF-8 file, one a line.")]
Stdin = Annotated[bool, typer.Option("--stdin", help="Read texts from stdin, UTF-8, one a line.")]
Prompt = Annotated[str | None, typer.Option(help="Name of a prompt of the model; '' for none.")]
Dimensions = Annotated[int | None, typer.Option(help="A shorter size of the embeddings that the model declares.")]

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_RETRIES = RetryPolicy().limit


@dataclass(frozen=True, slots=True)
class Server:
    """The options that say which server, and how to reach it."""

    url: str
    model: str = "encode"
    batch: int = 32
    retries: int = DEFAULT_RETRIES
    token: str | None = None
    header: list[str] | None = None
    root_certificate: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None

    def connect(self) -> EncoderClient:
        """A client of it.

        Raises:
            InvalidInput: an option is outside its limits.
        """
        return EncoderClient(
            self.url,
            model=self.model,
            batch=self.batch,
            retry=RetryPolicy(limit=self.retries),
            token=self.token,
            headers=named_headers(self.header),
            tls=tls_of(self.root_certificate, self.client_certificate, self.client_key),
        )


def named_headers(given: Sequence[str] | None) -> dict[str, str]:
    """The headers of --header.

    Raises:
        InvalidInput: one has no colon.
    """
    headers = {}
    for one in given or ():
        name, colon, value = one.partition(":")
        if not colon:
            # What was meant as NAME:VALUE may be a secret: it is not shown.
            raise InvalidInput("--header has no colon", limit="NAME:VALUE")
        headers[name.strip()] = value.strip()
    return headers


def tls_of(root: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    """The certificates of the command line; None when it names none, so that the url decides.

    Raises:
        InvalidInput: a file cannot be read, or a certificate is without its key.
    """
    return Tls(root, certificate, key) if root or certificate or key else None


def call_options(
    priority: PriorityOption | None,
    timeout: float | None,
    deadline: float | None,
    truncate: TruncateOption,
    overlap: int | None,
    *,
    bar: bool = False,
) -> CallOptions:
    """The options of a call out of those of a command."""
    return {
        "priority": None if priority is None else priority.value,
        "timeout": timeout,
        "deadline": deadline,
        "truncate": truncate.value,
        "overlap": overlap,
        "progress": bar,
    }


@contextmanager
def errors_to_exit_codes() -> Iterator[None]:
    """Turns an error into one line on stderr and its kind's exit code; a closed stdout ends the program in silence."""
    try:
        yield
    except EncoderError as error:
        notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        typer.echo(f"error: {' '.join(f'{notes}{error}'.split())}", err=True)
        raise typer.Exit(_EXIT_CODES.get(type(error), 1)) from None
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this the interpreter would complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from None
