"""Pieces of one bucket: from rows to the lane's tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .config import BucketRoute
from .errors import Refusal
from .ticket import Ticket
from .tokenise import Piece

#: Tensors of a bucket model by name, INT32.
LaneInputs = dict[str, NDArray[np.int32]]


@dataclass(frozen=True)
class Row:
    """One piece of one request: a text, a pair, or a window of one."""

    ticket: Ticket
    index: int

    @property
    def piece(self) -> Piece:
        """Its tokens."""
        return self.ticket.pieces[self.index]

    @property
    def ids(self) -> NDArray[np.int32]:
        """INT32 [length]."""
        return self.ticket.pieces[self.index].ids

    @property
    def interactive(self) -> bool:
        """Whether its request says that it is."""
        return self.ticket.question.options.level == "interactive"


@dataclass(frozen=True)
class Group:
    """Rows that go to a bucket model in one call; at most `route.batch` of them."""

    route: BucketRoute
    rows: tuple[Row, ...]

    def tensors(self, pad_id: int, *, segment: bool = False) -> LaneInputs:
        """The lane's inputs by name.

        Args:
            pad_id: padding token.
            segment: the lane takes `segment_start`.

        Returns:
            input_ids INT32 [b, L] padded with `pad_id`, length INT32 [b, 1], and with `segment` segment_start INT32
            [b, 1]: the first token of the second segment, or the length when there is none.
        """
        ids = np.full((len(self.rows), self.route.length), pad_id, dtype=np.int32)
        length = np.empty((len(self.rows), 1), dtype=np.int32)
        for position, row in enumerate(self.rows):
            own = row.ids
            ids[position, : own.size] = own
            length[position, 0] = own.size
        inputs = {"input_ids": ids, "length": length}
        if segment:
            starts = [[row.piece.segment_start] for row in self.rows]
            inputs["segment_start"] = np.array(starts, dtype=np.int32)
        return inputs

    def without_given_up(self) -> Group:
        """The rows whose requests still want an answer; the others are settled."""
        wanted = tuple(row for row in self.rows if not row.ticket.given_up)
        if len(wanted) == len(self.rows):
            return self
        self._settle(row for row in self.rows if row not in wanted)
        return Group(self.route, wanted)

    def deliver(self, answers: NDArray[np.float32]) -> None:
        """Hand each row its answer, FP32 [b, size] or [b, L, size] in the order of the rows."""
        for row, answer in zip(self.rows, answers, strict=True):
            row.ticket.rows[row.index] = answer
        self._settle(self.rows)

    def fail(self, refusal: Refusal) -> None:
        """Refuse every request that has a row here."""
        for row in self.rows:
            row.ticket.refuse(refusal)
        self._settle(self.rows)

    def _settle(self, rows: Iterable[Row]) -> None:
        for row in rows:
            row.ticket.settle(1)


def rows_by_bucket(tickets: Iterable[Ticket], buckets: tuple[BucketRoute, ...]) -> dict[BucketRoute, list[Row]]:
    """Sort every piece into the smallest bucket that holds it; only buckets with pieces appear, in rising length."""
    lengths = np.array([bucket.length for bucket in buckets])
    rows = [Row(ticket, index) for ticket in tickets for index in range(len(ticket.pieces))]
    places = np.searchsorted(lengths, [row.ids.size for row in rows])
    result: dict[int, list[Row]] = {}
    for row, place in zip(rows, places.tolist(), strict=True):
        result.setdefault(place, []).append(row)
    return {buckets[place]: result[place] for place in sorted(result)}


def groups_of(route: BucketRoute, rows: list[Row], most: int | None = None) -> Iterator[Group]:
    """Cut the rows of a bucket into the fewest calls the lane takes, about equally full, texts of like length together.

    With `most` a call has at most so many rows, if the lane takes more, and those of interactive requests come first.

    Equal shares keep two engines busy for the same time; like lengths let the CPU engine trim its padding.
    """
    if most is None:
        ordered, most = sorted(rows, key=lambda row: row.ids.size), route.batch
    else:
        ordered, most = sorted(rows, key=lambda row: (not row.interactive, row.ids.size)), min(route.batch, most)
    calls = -(-len(ordered) // most)
    edges = [len(ordered) * call // calls for call in range(calls + 1)]
    for begin, end in pairwise(edges):
        yield Group(route, tuple(ordered[begin:end]))
