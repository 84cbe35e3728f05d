"""What came of each request: columns in memory, JSON lines on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.load.plan import Request

OK = "ok"
#: What is kept of each request.
COLUMNS = ("scheduled", "sent", "done", "kind", "priority", "planned", "answered", "size", "status")


@dataclass
class Records:
    """One entry per request in each list; times in seconds from the start of the run.

    Attributes:
        scheduled: when it was due. In a closed loop: when its client was free.
        sent: when the generator handed it to the network.
        done: when its answer or error had arrived.
        kind: name of its class.
        priority: 1 interactive, 2 background, 0 none sent.
        planned: its length in tokens as the generator measured it.
        answered: its length in tokens as the server said; 0 when it said nothing.
        size: its bytes of UTF-8.
        status: "ok", or the kind of error.
        said: kind of error -> the words of one of them.
        busy: share of the run in which the busiest process of the generator computed or had to wait for a core; 0 where
            it was not measured.
        start: when the run began, on the clock of time.monotonic; 0 where nobody knows.
        cut_s: when the run was cut short, seconds from its start; 0 where it went to its end.
        given_up: requests that were under way then; there is no entry for them.
    """

    scheduled: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict, kw_only=True)
    busy: float = field(default=0.0, kw_only=True)
    start: float = field(default=0.0, kw_only=True)
    cut_s: float = field(default=0.0, kw_only=True)
    given_up: int = field(default=0, kw_only=True)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.scheduled)

    def add(self, request: Request, scheduled: float, sent: float, done: float, tokens: int, status: str) -> None:
        """Notes one finished request."""
        self.scheduled.append(scheduled)
        self.sent.append(sent)
        self.done.append(done)
        self.kind.append(request.kind)
        self.priority.append(request.priority)
        self.planned.append(request.tokens)
        self.answered.append(tokens)
        self.size.append(len(request.text.encode()))
        self.status.append(status)

    def latency_ms(self) -> NDArray[np.float64]:
        """float64 [n]: from when it was *due* until its end, milliseconds; a late generator cannot hide a slow server.

        See Gil Tene on "coordinated omission".
        """
        latency: NDArray[np.float64] = (np.asarray(self.done) - np.asarray(self.scheduled)) * 1000
        return latency

    def lateness_ms(self) -> NDArray[np.float64]:
        """float64 [n]: from when it was due until it was sent, milliseconds: the generator's own delay."""
        lateness: NDArray[np.float64] = (np.asarray(self.sent) - np.asarray(self.scheduled)) * 1000
        return lateness

    def ok(self) -> NDArray[np.bool_]:
        """bool [n]: whether it was answered."""
        return np.array([status == OK for status in self.status], bool)

    def where(self, chosen: NDArray[np.bool_]) -> Records:
        """The requests at which `chosen`, bool [n], is true."""
        places = np.flatnonzero(chosen)
        columns = ([getattr(self, name)[place] for place in places] for name in COLUMNS)
        kept = Records(*columns, said=self.said, busy=self.busy, start=self.start)
        kept.cut_s, kept.given_up = self.cut_s, self.given_up
        return kept

    def rows(self) -> Iterator[dict[str, Any]]:
        """One mapping per request, its times rounded to microseconds."""
        for number in range(len(self)):
            row = {name: getattr(self, name)[number] for name in COLUMNS}
            yield row | {name: round(row[name], 6) for name in ("scheduled", "sent", "done")}


def joined(parts: Sequence[Records]) -> Records:
    """The records of several processes as one, in the order the requests were due."""
    columns = [[value for part in parts for value in getattr(part, name)] for name in COLUMNS]
    order = np.argsort(np.asarray(columns[0]), kind="stable")
    return Records(
        *([column[place] for place in order] for column in columns),
        said={kind: words for part in reversed(parts) for kind, words in part.said.items()},
        busy=max((part.busy for part in parts), default=0.0),
        start=max((part.start for part in parts), default=0.0),
        cut_s=max((part.cut_s for part in parts), default=0.0),
        given_up=sum(part.given_up for part in parts),
    )


def write_records(path: Path, records: Records) -> None:
    """Writes one JSON object a line."""
    with path.open("w", encoding="utf-8") as stream:
        for row in records.rows():
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
