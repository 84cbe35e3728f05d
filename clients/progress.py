"""How a call says how far it is: a bar on a terminal, or a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from clients.options import Progress


@contextmanager
def reporter(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to be told how many texts are done.

    Args:
        progress: True draws a bar on stderr if that is a terminal; a function gets (done, total); False is silent.
        total: number of texts.
    """
    if not isinstance(progress, bool):
        report = progress
        yield lambda done: report(done, total)
        return
    console = Console(stderr=True) if progress else None  # one that is not used would cost each call 0.1 ms
    if console is None or not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("texts", total=total)
        yield lambda done: bar.update(task, completed=done)
