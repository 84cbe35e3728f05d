"""Command line of the client: texts in, JSON lines or a .npy file out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerUnavailable,
)
from clients.grpc_client import EncoderClient
from clients.result import EncodeResult

_EXIT_CODES: dict[type[EncoderError], int] = {
    InvalidInput: 2,
    QueueTimeout: 3,
    DeadlineExceeded: 3,
    Overloaded: 4,
    ServerUnavailable: 5,
}
_EXIT_HELP = (
    "Exit status: 0 done; 2 invalid input or usage; 3 a timeout or the deadline passed; 4 the server is overloaded; "
    "5 the server is unavailable; 1 anything else (141: whoever read the output closed it)."
)
_BATCHES_WITHOUT_BAR = 4
# Legal inside a JSON string, but some readers (Python's str.splitlines) end a line there.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
_CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell shows for a program that a closed pipe ended

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None)


class Priority(StrEnum):
    """--priority."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


class Truncate(StrEnum):
    """--truncate."""

    END = "end"
    ERROR = "error"


@app.callback()
def main() -> None:
    """Client of the encoder service."""


@app.command(epilog=_EXIT_HELP)
def encode(
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; a single - reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read texts from this UTF-8 file, one a line.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read texts from stdin, UTF-8, one a line.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the embeddings to this .npy file, float32 [n, dim]; all or nothing.")
    ] = None,
    url: Annotated[str, typer.Option(help="host:port of Triton's gRPC endpoint.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Name of the entry model.")] = "encode",
    batch: Annotated[int, typer.Option(help="Most texts of one request.")] = 32,
    priority: Annotated[Priority | None, typer.Option(help="Left out: background.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Longest wait of a request in the server's queue, seconds.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(help="Longest time for everything, seconds.")] = None,
    truncate: Annotated[
        Truncate, typer.Option(help="Text that is too long: cut its end off, or refuse it.")
    ] = Truncate.END,
) -> None:
    """Encode texts: one JSON object a line on stdout, or a .npy file with --output.

    A line is {"text": str, "tokens": int, "cut": int, "embedding": [float, ...]}, in the order of the texts. An empty
    line of a file is an empty text, so that line i stays row i.
    """
    with _errors_to_exit_codes(), EncoderClient(url, model=model, batch=batch) as client:
        given = _given(texts or [], file, stdin)
        if output is not None:
            _check_writable(output)
        try:
            results = client.encode_batches(
                given,
                priority=None if priority is None else priority.value,
                timeout=timeout,
                deadline=deadline,
                truncate=truncate.value,
            )
            shown = _with_bar(results, len(given), batch, json_lines=output is None)
            if output is None:
                _write_json_lines(shown, given)
            else:
                parts = [result.embeddings for result in shown]
                _write_npy(output, np.concatenate(parts) if parts else np.empty((0, client.dim()), np.float32))
        except EncoderError as error:
            if file is not None and error.texts:
                first, last = error.texts[0] + 1, error.texts[-1] + 1
                error.add_note(f"{file}, line {first}" if first == last else f"{file}, line {first} to {last}")
            raise


def _given(texts: list[str], file: Path | None, stdin: bool) -> list[str]:
    """The texts of the one source that is named."""
    stdin = stdin or texts == ["-"]
    if texts == ["-"]:
        texts = []
    if (bool(texts), file is not None, stdin).count(True) != 1:
        raise InvalidInput("no single source of texts", limit="one of TEXT..., --file FILE, --stdin (or -)")
    if stdin:
        return _lines(sys.stdin.buffer.read(), "stdin")
    if file is not None:
        try:
            return _lines(file.read_bytes(), str(file))
        except OSError as error:
            raise InvalidInput("the file cannot be read", value=str(file), limit=error.strerror) from None
    return texts


def _lines(data: bytes, name: str) -> list[str]:
    """The lines of UTF-8 `data`; \\n or \\r\\n ends a line, a byte order mark is dropped."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"{name}, line {number}: byte {error.start + 1} is not UTF-8",
                value=line[error.start : error.start + 1],
                remedy="convert the file to UTF-8, for example with iconv",
            ) from None
    return texts


def _check_writable(output: Path) -> None:
    """Refuses an --output that could not be written, before anything is computed."""
    if output.suffix != ".npy":
        raise InvalidInput("--output is not a .npy file", value=str(output), limit="a name that ends in .npy")
    if output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise InvalidInput(
            "--output cannot be written",
            value=str(output),
            remedy="name a file in a folder that exists and is writable",
        )


def _with_bar(results: Iterator[EncodeResult], total: int, batch: int, *, json_lines: bool) -> Iterator[EncodeResult]:
    """Passes the results on, with a bar on stderr if there are many and it would not mix with lines on a terminal."""
    console = Console(stderr=True)
    quiet = total <= _BATCHES_WITHOUT_BAR * batch or not console.is_terminal or (json_lines and sys.stdout.isatty())
    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet, redirect_stdout=False, redirect_stderr=False) as progress:
        bar = progress.add_task("texts", total=total)
        for result in results:
            yield result
            progress.advance(bar, len(result))


def _write_json_lines(results: Iterator[EncodeResult], texts: list[str]) -> None:
    """One object a text, UTF-8 whatever the locale says; a request's lines leave as soon as they are there."""
    out: BinaryIO = sys.stdout.buffer
    number = 0
    for result in results:
        for embedding, tokens, cut in result:
            line = {"text": texts[number], "tokens": tokens, "cut": cut, "embedding": _short(embedding)}
            out.write(json.dumps(line, ensure_ascii=False).translate(_LINE_ENDS).encode() + b"\n")
            number += 1
        out.flush()


def _short(embedding: npt.NDArray[np.float32]) -> list[float]:
    """The numbers with 9 digits: enough for every float32 to be read back exactly, half of what float64 would print."""
    return [float(f"{number:.9g}") for number in embedding.tolist()]


def _write_npy(output: Path, embeddings: npt.NDArray[np.float32]) -> None:
    """Writes beside the file, then renames: a reader sees the old file or the new one, whole."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as stream:
            np.save(stream, embeddings, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(output)
    except OSError as error:
        raise EncoderError("the output cannot be written", value=str(output), limit=error.strerror) from None
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
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
