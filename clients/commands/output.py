"""What commands write: JSON lines on stdout, a .npy file, a bar on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console

from clients.errors import EncoderError, InvalidInput
from clients.progress import reporter
from clients.result import EncodeResult

_BATCHES_WITHOUT_BAR = 4
# Legal inside a JSON string, but some readers (Python's str.splitlines) end a line there.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def write_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, UTF-8 whatever the locale says."""
    out: BinaryIO = sys.stdout.buffer
    for row in rows:
        out.write(json.dumps(row, ensure_ascii=False).translate(_LINE_ENDS).encode() + b"\n")
    out.flush()


def short(numbers: npt.NDArray[np.float32]) -> list[float]:
    """The numbers with 9 digits: enough for every float32 to be read back exactly, half of what float64 would print."""
    return [float(f"{number:.9g}") for number in numbers.tolist()]


def check_writable(output: Path) -> None:
    """Refuses an --output that could not be written, before anything is computed.

    Raises:
        InvalidInput: it is no .npy file in a writable folder.
    """
    if output.suffix != ".npy":
        raise InvalidInput("--output is not a .npy file", value=str(output), limit="a name that ends in .npy")
    if output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise InvalidInput(
            "--output cannot be written",
            value=str(output),
            remedy="name a file in a folder that exists and is writable",
        )


def write_npy(output: Path, array: npt.NDArray[np.float32]) -> None:
    """Writes beside the file, then renames: a reader sees the old file or the new one, whole.

    Raises:
        EncoderError: it cannot be written.
    """
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(output)
    except OSError as error:
        raise EncoderError("the output cannot be written", value=str(output), limit=error.strerror) from None
    finally:
        part.unlink(missing_ok=True)


def wants_bar(texts: Sequence[str], batch: int, *, lines: bool = True) -> bool:
    """Whether a bar is worth it: many requests, and it would not mix with lines on a terminal."""
    mixes = lines and sys.stdout.isatty()
    return len(texts) > _BATCHES_WITHOUT_BAR * batch and Console(stderr=True).is_terminal and not mixes


def with_bar(
    results: Iterator[EncodeResult], texts: Sequence[str], batch: int, *, lines: bool
) -> Iterator[EncodeResult]:
    """Passes the results on, with a bar where it is worth it."""
    done = 0
    with reporter(wants_bar(texts, batch, lines=lines), len(texts)) as report:
        for result in results:
            yield result
            done += len(result)
            report(done)
