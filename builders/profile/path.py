"""The request path from spans: what share of the time a request spends where, and what the GPU waits for.

Runs under Python 3.10, too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders.profile.kernels import covered

PREPARING = ("decode", "tokenise", "group")
"""Spans of the entry before a text is on its way to a lane."""


@dataclass(frozen=True)
class Span:
    """One span of one process, seconds of the machine's clock."""

    model: str
    process: int
    name: str
    begin: float
    end: float
    texts: int


def read_spans(folder: Path) -> list[Span]:
    """All spans that processes wrote into a folder (builders/serving/spans.py), by their beginning."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        model, _, process = path.stem.rpartition("-")
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                name, begin, end, texts = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue
            found.append(Span(model, int(process), name, begin, end, texts))
    return sorted(found, key=lambda span: span.begin)


def path_shares(spans: Sequence[Span]) -> dict[str, Any]:
    """Shares of the entry's and the lanes' time, and of the wall time in which the lanes idle while texts are prepared.

    Returns:
        `entry`: name to share of the entry's own time; `lanes`: model to name to seconds; `texts_a_batch` by model;
        `engine_busy`: share of the wall time in which some lane computes; `idle_while_preparing`: share in which none
        does and at least one request is in decode, tokenise or group. Empty without spans.
    """
    if not spans:
        return {}
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    entry: dict[str, float] = defaultdict(float)
    lanes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    batches: dict[str, list[int]] = defaultdict(list)
    for span in spans:
        if span.model.startswith("encoder_"):
            lanes[span.model][span.name] += span.end - span.begin
            if span.name == "execute":
                batches[span.model].append(span.texts)
        else:
            entry[span.name] += span.end - span.begin
    busy = [(span.begin, span.end) for span in spans if span.model.startswith("encoder_") and span.name == "execute"]
    preparing = [(span.begin, span.end) for span in spans if span.name in PREPARING]
    both = covered([*busy, *preparing])
    whole = sum(entry.values()) or 1.0
    return {
        "seconds": last - first,
        "entry": {name: value / whole for name, value in entry.items()},
        "lanes": {model: dict(parts) for model, parts in sorted(lanes.items())},
        "texts_a_batch": {model: sum(sizes) / len(sizes) for model, sizes in sorted(batches.items())},
        "engine_busy": covered(busy) / (last - first),
        "idle_while_preparing": (both - covered(busy)) / (last - first),
    }


def between(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The spans that lie inside a time."""
    return [span for span in spans if span.begin >= begin and span.end <= end]
