"""The load of a profile: a closed loop of texts in three classes of length, by the load generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from clients.load.plan import Plan, Request
from clients.load.records import OK, Records

WORDS = ("queue", "batch", "token", "window", "lane", "priority", "latency", "request", "answer", "model", "memory")
SHARES = (0.65, 0.20, 0.15)
"""Of texts up to a quarter, a half and all of the longest bucket."""


@dataclass(frozen=True)
class Latencies:
    """What was measured: milliseconds by class of length, the errors by their words, and how long it took, seconds."""

    by_class: Mapping[str, Sequence[float]]
    errors: Mapping[str, int]
    seconds: float

    @property
    def all(self) -> list[float]:
        """Every latency, milliseconds."""
        return [value for values in self.by_class.values() for value in values]


def mixed_plan(longest: int, seconds: float, number: int = 2000, seed: int = 3) -> Plan:
    """A closed loop of different texts up to `longest` tokens, in classes drawn by SHARES.

    A word of WORDS is about one token, two more are special.
    """
    random = np.random.default_rng(seed)
    bounds = (2, max(4, longest // 4), max(6, longest // 2), max(8, longest))
    classes = list(pairwise(bounds))
    requests = []
    for place in random.choice(len(classes), number, p=SHARES):
        least, most = classes[place]
        size = int(random.integers(max(1, least - 1), max(2, most - 2) + 1))
        requests.append(Request(0.0, " ".join(random.choice(WORDS, size)), f"up to {most}", 0, size + 2))
    return Plan(tuple(requests), seconds, exact=False)


def latencies_of(records: Records, plan: Plan) -> Latencies:
    """Of the answered requests by class, the shortest texts first; a class that nothing was answered of is empty."""
    names = sorted({request.kind for request in plan.requests}, key=lambda name: int(name.rpartition(" ")[2]))
    latency, ok, kinds = records.latency_ms(), records.ok(), np.array(records.kind)
    errors: dict[str, int] = {}
    for status in records.status:
        if status != OK:
            words = f"{status}: {records.said.get(status, '')}"
            errors[words] = errors.get(words, 0) + 1
    # Until the last answer: a request that fails late would stretch the time that the throughput is taken over.
    seconds = float(np.asarray(records.done)[ok].max(initial=0.0))
    return Latencies({name: latency[ok & (kinds == name)].tolist() for name in names}, errors, seconds)
