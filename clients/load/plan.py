"""The requests of a run: when each is due, its text and its class. Equal arguments and seed give equal plans."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from clients.errors import InvalidInput
from clients.load.texts import MOST_TOKENS, Mix, TextSource

Arrivals = Literal["poisson", "constant"]
PRIORITIES = {"interactive": 1, "background": 2}

_SEGMENT = re.compile(r"\s*([0-9.]+)(?:-([0-9.]+))?x([0-9.]+)\s*")
_CLASS = re.compile(
    r"\s*([\w.-]+)(?:/([0-9]+|interactive|background))?\s+((?:[0-9]*\.)?[0-9]+)\s*%\s*(?::(.*))?", re.DOTALL
)
_MOST_REQUESTS = 5_000_000
_LEVELS = (0, *PRIORITIES.values())
_PRIORITY_FORM = "interactive or 1, background or 2, 0 for none"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of one text.

    Attributes:
        at: when it is due, seconds from the start (0 in a closed loop, where it is due when a client is free).
        text: what to send.
        kind: name of its class.
        priority: 1 interactive, 2 background, 0 to send none.
        tokens: its length as `TextSource` measured it.
    """

    at: float
    text: str
    kind: str
    priority: int
    tokens: int


@dataclass(frozen=True)
class Segment:
    """A stretch of `seconds` in which the rate goes from `rate` to `until` requests a second in a straight line."""

    rate: float
    until: float
    seconds: float

    @property
    def requests(self) -> float:
        """Requests expected in it."""
        return (self.rate + self.until) / 2 * self.seconds


@dataclass(frozen=True)
class LoadClass:
    """A part of the load: its name, its share of the requests (of 1), its priority (0: none) and its lengths."""

    name: str
    share: float
    priority: int
    mix: Mix | None = None


@dataclass(frozen=True)
class Plan:
    """The requests of a run, in the order they are due.

    Attributes:
        requests: as above; a closed loop takes them in turn, from the first again when they are used up.
        seconds: length of the run by plan.
        exact: whether the lengths were measured with the model's tokenizer.
        stretches: the parts of a rate that changes: a name, and when it begins, seconds.
    """

    requests: tuple[Request, ...]
    seconds: float
    exact: bool
    stretches: tuple[tuple[str, float], ...] = ()

    @property
    def rate(self) -> float:
        """Requests a second offered on average."""
        return len(self.requests) / self.seconds if self.seconds else 0.0

    def until(self, seconds: float) -> Plan:
        """What of it was due within the first seconds; itself if it is not longer than that."""
        if seconds >= self.seconds:
            return self
        requests = tuple(request for request in self.requests if request.at < seconds)
        return Plan(requests, seconds, self.exact, tuple(one for one in self.stretches if one[1] < seconds))


def parse_profile(spec: str) -> tuple[Segment, ...]:
    """Reads "20x30, 20-60x60, 200x2": 20/s for 30 s, a ramp from 20/s to 60/s in 60 s, a spike of 200/s for 2 s.

    Raises:
        InvalidInput: another form, a negative rate, no time, or no request at all.
    """
    found = [_SEGMENT.fullmatch(part) for part in spec.split(",")]
    try:
        segments = tuple(Segment(float(m[1]), float(m[2] or m[1]), float(m[3])) for m in found if m)
    except ValueError:
        segments = ()
    if len(segments) != len(found) or not segments or any(segment.seconds <= 0 for segment in segments):
        raise InvalidInput("the profile cannot be read", value=spec, limit="RATE[-RATE]xSECONDS, ... with seconds > 0")
    expected = sum(segment.requests for segment in segments)
    if not 0 < expected <= _MOST_REQUESTS:
        raise InvalidInput("the profile's requests", value=expected, limit=f"more than 0, at most {_MOST_REQUESTS}")
    return segments


def parse_classes(specs: Iterable[str]) -> tuple[LoadClass, ...]:
    """Reads "interactive 70%", "bulk/background 30%: 50% 100, 50% 480": NAME[/PRIORITY] SHARE% [: MIX].

    A class named interactive or background has that priority; another name without one sends none.

    Raises:
        InvalidInput: another form, a priority that is none, a name twice, or shares that do not add up to 100 %.
    """
    classes = []
    for spec in specs:
        found = _CLASS.fullmatch(spec)
        if not found:
            raise InvalidInput("the class cannot be read", value=spec, limit="NAME[/PRIORITY] SHARE% [: MIX]")
        name, priority, share, mix = found.groups()
        number = priority or name
        level = int(number) if priority and number.isdigit() else PRIORITIES.get(number, 0)
        if level not in _LEVELS:  # Triton would serve it as background, without a word
            raise InvalidInput(f"the priority of class {name!r}", value=priority, limit=_PRIORITY_FORM)
        classes.append(LoadClass(name, float(share) / 100, level, Mix.parse(mix) if mix else None))
    total = sum(one.share for one in classes)
    if abs(total - 1) > 1e-6 or len({one.name for one in classes}) < len(classes):
        raise InvalidInput(
            "the classes do not fit together",
            value=[f"{one.name} {100 * one.share:g}%" for one in classes],
            limit="different names, shares that add up to 100 %",
        )
    return tuple(classes)


def arrival_times(segments: Sequence[Segment], arrivals: Arrivals, chance: random.Random) -> list[float]:
    """When requests are due, seconds, rising.

    `constant` spaces them evenly by the rate of the moment. `poisson` is a Poisson process of that rate: a process of
    rate 1 on the axis of expected requests, taken back to time (the time-change theorem).
    """
    total = sum(segment.requests for segment in segments)
    times: list[float] = []
    began, passed, place = 0.0, 0.0, 0
    due = chance.expovariate(1.0) if arrivals == "poisson" else 0.5
    while due < total:
        # The last segment takes what rounding pushes over its end.
        while place < len(segments) - 1 and due >= passed + segments[place].requests:
            passed += segments[place].requests
            began += segments[place].seconds
            place += 1
        times.append(began + _time_of(segments[place], due - passed))
        due += chance.expovariate(1.0) if arrivals == "poisson" else 1.0
    return times


def _time_of(segment: Segment, expected: float) -> float:
    """The time within a segment by which `expected` requests are expected: rate·t + slope·t²/2 = expected."""
    slope = (segment.until - segment.rate) / segment.seconds
    if abs(slope) < 1e-12:
        return expected / segment.rate
    # This form of the root has no difference of nearly equal numbers.
    return 2 * expected / (segment.rate + math.sqrt(max(0.0, segment.rate**2 + 2 * slope * expected)))


def open_plan(
    source: TextSource,
    segments: Sequence[Segment],
    classes: Sequence[LoadClass] = (),
    mix: Mix | None = None,
    *,
    arrivals: Arrivals = "poisson",
    seed: int = 0,
) -> Plan:
    """Requests at their own times, whatever the server does.

    Args:
        source: gives the texts.
        segments: the rate over time.
        classes: parts of the load; one class "all" without a priority when empty.
        mix: lengths of classes that have none of their own.
        arrivals: see `arrival_times`.
        seed: of the times, the texts and the classes.

    Raises:
        InvalidInput: more requests than can be planned.
    """
    expected = sum(segment.requests for segment in segments)
    if not expected <= _MOST_REQUESTS:
        raise InvalidInput("the requests of the load", value=expected, limit=f"at most {_MOST_REQUESTS}")
    times = arrival_times(segments, arrivals, random.Random(seed))  # noqa: S311 - load, not secrets
    requests = _requests(source, times, classes, mix, seed)
    return Plan(requests, sum(segment.seconds for segment in segments), source.exact, _stretches(segments))


def _stretches(segments: Sequence[Segment]) -> tuple[tuple[str, float], ...]:
    """As `Plan` has them; a single segment is the whole run."""
    ends = list(accumulate(segment.seconds for segment in segments))
    named = []
    for segment, began, ended in zip(segments, [0.0, *ends], ends, strict=False):
        rate = f"{segment.rate:g}" if segment.rate == segment.until else f"{segment.rate:g}–{segment.until:g}"
        named.append((f"{began:g}–{ended:g} s: {rate}/s", began))
    return tuple(named) if len(named) > 1 else ()


def closed_plan(
    source: TextSource,
    texts: int,
    seconds: float,
    classes: Sequence[LoadClass] = (),
    mix: Mix | None = None,
    *,
    seed: int = 0,
) -> Plan:
    """`texts` different requests for clients that send one as soon as the last is answered, for `seconds` seconds.

    Raises:
        InvalidInput: `seconds` has no end.
    """
    if not 0 < seconds < math.inf:
        raise InvalidInput("the length of the run", value=seconds, limit="above 0 seconds, with an end")
    return Plan(_requests(source, [0.0] * texts, classes, mix, seed), seconds, source.exact)


def _requests(
    source: TextSource, times: Sequence[float], classes: Sequence[LoadClass], mix: Mix | None, seed: int
) -> tuple[Request, ...]:
    chance = random.Random(f"{seed} texts")  # noqa: S311
    parts = tuple(classes) or (LoadClass("all", 1.0, 0),)
    chosen = chance.choices(range(len(parts)), [part.share for part in parts], k=len(times))
    # One draw a class, so that a tokenizer measures many texts at once.
    texts = {
        number: iter(source.draw(chosen.count(number), part.mix or mix, chance)) for number, part in enumerate(parts)
    }
    requests = []
    for at, number in zip(times, chosen, strict=True):
        text = next(texts[number])
        requests.append(Request(at, text.text, parts[number].name, parts[number].priority, text.tokens))
    return tuple(requests)


def read_trace(path: Path, source: TextSource, *, speed: float = 1.0, seed: int = 0) -> Plan:
    """A recorded load, to be replayed: JSON lines with `offset_s`, and `text` or `tokens`.

    Further keys: `priority` ("interactive" or 1, "background" or 2, 0 for none; default: that of a class of that name)
    and `class` (a name; default: the priority's).

    Args:
        path: the file; lines may be in any order.
        source: gives the texts of lines that have `tokens` alone.
        speed: 2 replays it in half of the time.
        seed: of those texts.

    Raises:
        InvalidInput: a line that cannot be used, named by its number.
    """
    chance = random.Random(seed)  # noqa: S311
    rows: list[tuple[float, str, str, int]] = []
    try:
        # Not splitlines: JSON strings may hold what it takes for the end of a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("the trace cannot be read", value=str(path), limit=str(error)) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line), source, chance))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            words = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidInput(
                f"{path}, line {number} is no request ({words})",
                value=line,
                limit='{"offset_s": seconds >= 0, "text": str or "tokens": number, "priority": ..., "class": ...}',
            ) from None
    if not rows or not 0 < speed < math.inf:
        raise InvalidInput("the trace has no request, or no speed", value=str(path), limit="a line, a speed above 0")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    measured = source.measured([row[1] for row in rows])
    requests = tuple(
        Request((at - first) / speed, text.text, kind, priority, text.tokens)
        for (at, _, kind, priority), text in zip(rows, measured, strict=True)
    )
    gaps = [b.at - a.at for a, b in pairwise(requests)]
    return Plan(requests, max(requests[-1].at + (sum(gaps) / len(gaps) if gaps else 1.0), 1e-3), source.exact)


def _row(row: dict[str, Any], source: TextSource, chance: random.Random) -> tuple[float, str, str, int]:
    at, kind, priority = float(row["offset_s"]), row.get("class"), row.get("priority")
    if not 0 <= at < math.inf:
        raise ValueError(f"offset_s is {at}")
    if "text" in row and not isinstance(row["text"], str):
        raise TypeError("text is no string")
    tokens = 1 if "text" in row else int(row["tokens"])
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"tokens is {tokens}, not 1 to {MOST_TOKENS}")
    text = row["text"] if "text" in row else source.cut(tokens, chance)
    text.encode()  # a lone surrogate cannot be sent
    level = PRIORITIES.get(str(kind), 0) if priority is None else PRIORITIES.get(str(priority), priority)
    if isinstance(level, bool) or level not in _LEVELS:
        raise ValueError(f"priority is {priority!r}, not {_PRIORITY_FORM}")
    names = {number: name for name, number in PRIORITIES.items()}
    return at, text, str(kind or names.get(int(level), "all")), int(level)
