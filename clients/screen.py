"""Tables at their full width: a figure is never cut."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def width_of(table: Table) -> int:
    """Characters that the widest line of a table takes."""
    console = Console()
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def print_whole(console: Console, table: Table) -> None:
    """Prints a table on a terminal, or into a file, however narrow the console takes it to be."""
    # A console never prints wider than itself; one of its own width on the same file does.
    wide = Console(file=console.file, width=max(width_of(table), console.width), highlight=False)
    wide.print(table, crop=False)
