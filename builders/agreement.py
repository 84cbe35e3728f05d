"""How alike two versions answer the same texts, asked of a server while one of them is on trial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.change import SPOKEN
from builders.contract import TEXT, TEXT_PAIR
from builders.control import ModelControl
from builders.errors import BuilderError
from builders.manifest import Manifest
from builders.serving.entry.metrics import ArmName
from builders.serving.entry.trial import place_of

#: Asked where no texts are given: short and long, more than one script.
SAMPLE = (
    "Where is my order?",
    "The parcel left our house on Tuesday and should be with you by the end of the week.",
    "Wie weit ist es bis zum Mond?",
    "How far is the moon? " * 12,
    "月はどのくらい遠いですか",
    "def area(radius): return 3.14159 * radius ** 2",
    "A reply that was promised within two days and did not come. " * 6,
    "ok",
)
#: Texts asked at most.
MOST = 256


@dataclass(frozen=True)
class Agreement:
    """What came out.

    Attributes:
        texts: how many were asked.
        what: what was compared.
        mean: on average; 1 is alike for a cosine and for words, 0 for a difference.
        worst: of the text with the least agreement.
    """

    texts: int
    what: str
    mean: float
    worst: float

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.what} of both versions' answers to {self.texts} texts: {self.mean:.4f}, worst {self.worst:.4f}"


def request_ids(arm: ArmName, share: float, prefix: str) -> Sequence[str]:
    """A few ids of requests that a trial of this share gives to an arm."""
    low = 0.0 if arm == "candidate" else share
    fitting = (name for name in (f"{prefix}-{number}" for number in itertools.count()) if low <= place_of(name))
    return list(itertools.islice((name for name in fitting if place_of(name) < low + share), 8))


def ask_both(
    control: ModelControl,
    manifest: Manifest,
    served: int,
    share: float,
    texts: Sequence[str],
    between: Callable[[], None] = lambda: None,
) -> Agreement:
    """Ask each text of both arms of a trial and compare.

    Where the candidate cannot answer, the served version does, and is compared with itself; the trial's counters tell
    how often that was.

    Args:
        control: of the server.
        manifest: of one of the two versions, for the entry's tensors.
        served: the version of the entry that is asked.
        share: of the trial.
        texts: at least one.
        between: called before each question; keeps the trial going.

    Raises:
        ControlError: the server gives no answer.
    """
    spoken = SPOKEN.get(manifest.task)
    output = spoken or manifest.output.name
    arms: tuple[ArmName, ArmName] = ("candidate", "control")
    ids = {arm: itertools.cycle(request_ids(arm, share, "agreement")) for arm in arms}

    def asked(arm: ArmName, text: str) -> NDArray[Any]:
        between()
        named = {TEXT: text} if manifest.requests.pair != "required" else {TEXT: text, TEXT_PAIR: text}
        return control.ask_entry(manifest.entry_model, served, named, output, next(ids[arm]))

    pairs = [(asked("candidate", text), asked("control", text)) for text in texts[:MOST]]
    if spoken is not None:
        same = [float(one.tobytes() == other.tobytes()) for one, other in pairs]
        return Agreement(len(pairs), "share of equal words", float(np.mean(same)), min(same))
    if manifest.task == "embedding":
        cosines = [_cosine(one[0], other[0]) for one, other in pairs]
        return Agreement(len(pairs), "cosine", float(np.mean(cosines)), min(cosines))
    apart = [float(np.abs(one - other).max()) for one, other in pairs]
    return Agreement(len(pairs), "difference of the scores", float(np.mean(apart)), max(apart))


def read_texts(lines: str) -> tuple[str, ...]:
    """One text a line; empty lines are left out.

    Raises:
        BuilderError: there is none.
    """
    texts = tuple(line.strip() for line in lines.splitlines() if line.strip())
    if not texts:
        raise BuilderError("the file of texts is empty", remedy="write one text a line, or leave --texts out")
    return texts


def _cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0
