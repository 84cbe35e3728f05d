"""What measurements print: tables in Markdown, and each promise with its limit and the value that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """One promise and what became of it.

    Attributes:
        what: is promised.
        value: measured.
        limit: the most it may be; None where the figure is only told.
        unit: of both.
    """

    what: str
    value: float
    limit: float | None = None
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value keeps to its limit; one that is no number does not."""
        return self.limit is None or self.value <= self.limit

    def cells(self) -> list[str]:
        """What, limit, value, verdict."""
        limit = "—" if self.limit is None else f"{self.limit:g} {self.unit}".strip()
        verdict = "—" if self.limit is None else "holds" if self.holds else "FAILS"
        return [self.what, limit, f"{self.value:.3g} {self.unit}".strip(), verdict]


def print_promises(promises: Sequence[Promise]) -> bool:
    """Print them as a table; returns whether all hold."""
    print()
    for line in markdown(["promise", "limit", "value", "verdict"], [promise.cells() for promise in promises]):
        print(line, flush=True)
    return all(promise.holds for promise in promises)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, its columns as wide as they need to be."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    for number, row in enumerate((header, *rows)):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
