"""A candidate against its control, from the entry's own counters of a trial: how many, how fast, and is it worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rich.table import Table

from builders.serving.entry.metrics import (
    ARMS,
    CANDIDATE,
    CANDIDATE_REQUESTS,
    CANDIDATE_SECONDS,
    OUTCOMES,
    ArmName,
)
from builders.serving.entry.trial import EDGES
from clients.status import samples

#: Parts of the answers whose time is told: a half, …, all but one of a hundred.
QUANTILES = (0.5, 0.9, 0.95, 0.99)
#: A quantile is judged when as many answers of each arm lie above it: with fewer it is luck.
ABOVE = 10
#: Two times that differ by no more than this are the same, seconds.
SLACK_S = 0.001
#: With so many failures and more than the limit, a trial does not go on.
HOPELESS = 10


@dataclass(frozen=True)
class Limits:
    """What a candidate must hold to.

    Attributes:
        slower: its times, as a multiple of the control's.
        errors: share of its requests that fail or come too late, above the control's.
        least: answers of each arm; with fewer nothing is known.
    """

    slower: float = 1.25
    errors: float = 0.001
    least: int = 100


@dataclass(frozen=True)
class ArmCounts:
    """What one arm did.

    Attributes:
        outcomes: requests by `Outcome`.
        within: answers that took no longer than each of `EDGES`, and all of them at the end.
    """

    outcomes: Mapping[str, float] = field(default_factory=dict)
    within: Sequence[float] = (0.0,) * (len(EDGES) + 1)

    @property
    def answered(self) -> int:
        """Answers with numbers, in time."""
        return int(self.outcomes.get("answered", 0))

    @property
    def bad(self) -> int:
        """Requests that it failed, or did not answer in time."""
        return int(self.outcomes.get("failed", 0) + self.outcomes.get("late", 0))

    @property
    def bad_share(self) -> float:
        """The same as a share of those that it could answer."""
        asked = self.answered + self.bad
        return self.bad / asked if asked else 0.0

    def quantile(self, part: float) -> float | None:
        """The time within which this part of the answers came, seconds; None without answers.

        Within a bucket, a sixth of its edge wide, the answers are taken to lie evenly.
        """
        rank = part * self.within[-1]
        if rank <= 0:
            return None
        for place, (low, high) in enumerate(pairwise((0.0, *EDGES))):
            below = self.within[place - 1] if place else 0.0
            if self.within[place] >= rank:
                return low + (high - low) * (rank - below) / (self.within[place] - below)
        return EDGES[-1]

    def since(self, before: ArmCounts) -> ArmCounts:
        """What was added after `before`."""
        outcomes = {name: value - before.outcomes.get(name, 0.0) for name, value in self.outcomes.items()}
        return ArmCounts(outcomes, tuple(now - then for now, then in zip(self.within, before.within, strict=True)))


@dataclass(frozen=True)
class TrialCounts:
    """What a metrics page says of a trial.

    Attributes:
        arms: by name.
        on_trial: the version that each process of the entry tries, 0 for none; empty where the entry knows no trials.
        requests: that the entry answered without an error, with and without the trial.
    """

    arms: Mapping[ArmName, ArmCounts]
    on_trial: tuple[int, ...]
    requests: float

    def since(self, before: TrialCounts) -> TrialCounts:
        """What was added after `before`; the processes as they are now."""
        arms = {name: counts.since(before.arms[name]) for name, counts in self.arms.items()}
        return TrialCounts(arms, self.on_trial, self.requests - before.requests)

    @property
    def share(self) -> float:
        """The part of all answers that the candidate gave."""
        return self.arms["candidate"].answered / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate may be promoted.

    Attributes:
        kind: unknown where there were too few answers to say.
        reasons: why not.
    """

    kind: Literal["not worse", "worse", "unknown"]
    reasons: tuple[str, ...] = ()


def read_counts(page: str, entry: str, version: int) -> TrialCounts:
    """A metrics page, as far as one version of an entry goes."""
    outcomes: dict[str, dict[str, float]] = {arm: dict.fromkeys(OUTCOMES, 0.0) for arm in ARMS}
    places = {f"{edge:g}": place for place, edge in enumerate((*EDGES, float("inf")))} | {"+Inf": len(EDGES)}
    within = {arm: [0.0] * (len(EDGES) + 1) for arm in ARMS}
    on_trial, requests = [], 0.0
    for name, labels, value in samples(page):
        if labels.get("model") != entry or labels.get("version") != str(version):
            continue
        if name == CANDIDATE.name:
            on_trial.append(int(value))
        elif name == CANDIDATE_REQUESTS.name and labels["arm"] in outcomes:
            outcomes[labels["arm"]][labels["outcome"]] = value
        elif name == CANDIDATE_SECONDS.name and labels["arm"] in within and labels["le"] in places:
            within[labels["arm"]][places[labels["le"]]] = value
        elif name == "nv_inference_request_success":
            requests += value
    arms = {arm: ArmCounts(outcomes[arm], tuple(within[arm])) for arm in ARMS}
    return TrialCounts(arms, tuple(on_trial), requests)


def judge(counts: TrialCounts, limits: Limits) -> Verdict:
    """Compare the candidate with the control.

    The times are compared at each of `QUANTILES` that both arms have enough answers for.
    """
    candidate, control = counts.arms["candidate"], counts.arms["control"]
    reasons = list(_errors(candidate, control, limits))
    for part in judged_quantiles(counts):
        ours, theirs = candidate.quantile(part), control.quantile(part)
        if ours is not None and theirs is not None and ours > theirs * limits.slower + SLACK_S:
            reasons.append(
                f"P{part * 100:g} is {ours * 1000:.1f} ms, the control's {theirs * 1000:.1f} ms; "
                f"limit: {limits.slower:g} times as long"
            )
    if reasons:
        return Verdict("worse", tuple(reasons))
    fewest = min(candidate.answered, control.answered)
    if fewest < limits.least:
        return Verdict(
            "unknown", (f"too few answers to compare: {fewest}; limit: at least {limits.least} of each arm",)
        )
    return Verdict("not worse")


def judged_quantiles(counts: TrialCounts) -> tuple[float, ...]:
    """Those of `QUANTILES` that `ABOVE` answers of each arm lie above."""
    fewest = min(arm.answered for arm in counts.arms.values())
    return tuple(part for part in QUANTILES if (1 - part) * fewest >= ABOVE - 1e-9)


def is_hopeless(counts: TrialCounts, limits: Limits) -> bool:
    """Whether the candidate fails so often that a trial need not go on."""
    candidate, control = counts.arms["candidate"], counts.arms["control"]
    return candidate.bad >= HOPELESS and any(_errors(candidate, control, limits))


def comparison_table(counts: TrialCounts, candidate: int, served: int) -> Table:
    """Both arms, one a row; a time in brackets is of too few answers to be judged."""
    table = Table(box=None, pad_edge=False)
    table.add_column("version")
    for name in ("answered", "failed", "late", "skipped", *(f"P{part * 100:g} ms" for part in QUANTILES)):
        table.add_column(name, justify="right")
    judged = judged_quantiles(counts)
    rows: tuple[tuple[ArmName, str], ...] = (
        ("control", f"{served}, served (control)"),
        ("candidate", f"{candidate}, candidate"),
    )
    for arm, title in rows:
        of = counts.arms[arm]
        numbers = [f"{of.outcomes.get(name, 0):.0f}" for name in ("answered", "failed", "late", "skipped")]
        times = [_time(of.quantile(part), part in judged) for part in QUANTILES]
        table.add_row(title, *numbers, *times)
    return table


def _time(seconds: float | None, judged: bool) -> str:
    if seconds is None:
        return "-"
    text = f"{seconds * 1000:.1f}"
    return text if judged else f"({text})"


def _errors(candidate: ArmCounts, control: ArmCounts, limits: Limits) -> Sequence[str]:
    most = control.bad_share + limits.errors
    if candidate.bad_share <= most:
        return ()
    return (
        f"{candidate.bad} of its {candidate.answered + candidate.bad} requests failed or came too late, "
        f"{candidate.bad_share:.2%}; limit: {most:.2%}",
    )
