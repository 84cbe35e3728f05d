"""What a run amounts to: percentiles by class and length, throughput, errors, and whether the generator kept up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clients.errors import InvalidInput
from clients.load.plan import Plan
from clients.load.records import OK, Records

#: Upper ends of the length groups, tokens; what is longer is a group of its own.
LENGTHS = (32, 128, 256, 512)
LATE_LIMIT_MS = 10.0
#: A percentile of fewer samples beyond it than this is a guess.
_BEYOND = 5


@dataclass(frozen=True)
class Group:
    """Latency of a group of requests.

    Attributes:
        name: "all", a class or a range of tokens.
        requests: sent.
        failed: of them without an answer.
        p50, p90, p99, p999, longest: latency of the answered ones from the scheduled time, milliseconds; NaN when there
            are none.
        sure_p99, sure_p999: whether at least five answers lie beyond the percentile.
    """

    name: str
    requests: int
    failed: int
    p50: float
    p90: float
    p99: float
    p999: float
    longest: float
    sure_p99: bool
    sure_p999: bool


@dataclass(frozen=True)
class Summary:
    """A run in figures.

    Attributes:
        loop: "open" or "closed".
        seconds: that the throughput is taken over: from the first request being due to the last answer (open), or the
            stated time (closed).
        offered: requests a second by plan; 0 in a closed loop.
        throughput: answered requests a second.
        errors: kind of error -> requests.
        overall, classes, lengths: latency of all, by class, by tokens.
        p99_or_failed: P99 with each failed request counted as infinitely slow: what a stop line must be held against.
        late_p99_ms, late_max_ms: the generator's own delay, see `Records.lateness_ms`.
        valid: whether the P99 of that delay kept to its limit; otherwise the generator was the bottleneck.
        warnings: what to know before the figures are believed.
    """

    loop: str
    seconds: float
    offered: float
    throughput: float
    errors: Mapping[str, int]
    overall: Group
    classes: tuple[Group, ...]
    lengths: tuple[Group, ...]
    p99_or_failed: float
    late_p99_ms: float
    late_max_ms: float
    valid: bool
    warnings: tuple[str, ...] = field(default=())


def summarise(
    records: Records,
    plan: Plan,
    *,
    clients: int = 0,
    lengths: Sequence[int] = LENGTHS,
    late_limit_ms: float = LATE_LIMIT_MS,
    warm_s: float = 0.0,
) -> Summary:
    """The summary of a run.

    Args:
        records: at least one.
        plan: what was to be sent.
        clients: of the closed loop; 0 for the open loop.
        lengths: upper ends of the length groups, tokens, rising.
        late_limit_ms: a P99 of the generator's delay above this makes the run invalid, milliseconds.
        warm_s: requests due (in a closed loop: done) in the first seconds are left out.

    Raises:
        InvalidInput: no record is left.
    """
    # In a closed loop a request that began in the warm-up and ended after it is work of the time that counts.
    kept = records.where(np.asarray(records.done if clients else records.scheduled) >= warm_s)
    if not len(kept):
        raise InvalidInput("no request is left to summarise", value=len(records), limit=f"after {warm_s:g} s")
    answered, latency = kept.ok(), kept.latency_ms()
    lateness = kept.lateness_ms()
    late_p99 = float(np.percentile(lateness, 99))
    seconds, throughput = _throughput(kept, plan, clients, warm_s)
    valid = bool(clients) or late_p99 <= late_limit_ms
    failed = int((~answered).sum())
    overall = _group("all", kept, np.ones(len(kept), bool))
    warnings = []
    if not valid:
        warnings.append(
            f"INVALID: the generator was the bottleneck: P99 of its own delay {late_p99:.1f} ms, limit "
            f"{late_limit_ms:g} ms; use more processes, or leave it a core of its own"
        )
    if failed:
        warnings.append(f"{failed} of {len(kept)} requests failed; percentiles are those of the answered ones")
    if not overall.sure_p99:
        warnings.append(f"{len(kept)} requests are few for a P99: fewer than {_BEYOND} lie beyond it")
    return Summary(
        loop="closed" if clients else "open",
        seconds=seconds,
        offered=0.0 if clients else plan.rate,
        throughput=throughput,
        errors=dict(Counter(status for status in kept.status if status != OK)),
        overall=overall,
        classes=tuple(_group(name, kept, np.array(kept.kind) == name) for name in sorted(set(kept.kind))),
        lengths=tuple(_by_length(kept, plan.exact, lengths)),
        p99_or_failed=_with_failures(latency, answered),
        late_p99_ms=late_p99,
        late_max_ms=float(lateness.max()),
        valid=valid,
        warnings=tuple(warnings),
    )


def _throughput(records: Records, plan: Plan, clients: int, warm_s: float) -> tuple[float, float]:
    done = np.asarray(records.done)[records.ok()]
    if clients:  # what ends after the time is over was not done in it
        seconds = plan.seconds - warm_s
        return seconds, float((done <= plan.seconds).sum() / seconds)
    seconds = float(max(records.done)) - warm_s
    return seconds, len(done) / seconds


def tokens_of(records: Records, exact: bool) -> NDArray[np.int64]:
    """int64 [n]: tokens by the generator's own measure when that is the model's, else as the server said them."""
    planned, answered = np.asarray(records.planned), np.asarray(records.answered)
    return planned if exact else np.where(answered > 0, answered, planned)


def _by_length(records: Records, exact: bool, lengths: Sequence[int]) -> Iterable[Group]:
    tokens, low = tokens_of(records, exact), 0
    for high in (*lengths, math.inf):
        chosen = (tokens > low) & (tokens <= high)
        if chosen.any():
            yield _group(f"{low + 1}–{high}" if math.isfinite(high) else f"over {low}", records, chosen)
        low = int(high) if math.isfinite(high) else low


def _group(name: str, records: Records, chosen: NDArray[np.bool_]) -> Group:
    answered = chosen & records.ok()
    latency, requests = records.latency_ms()[answered], int(chosen.sum())
    p50, p90, p99, p999, longest = (
        float(np.percentile(latency, share)) if len(latency) else math.nan for share in (50, 90, 99, 99.9, 100)
    )
    sure_p99, sure_p999 = (len(latency) * beyond >= _BEYOND for beyond in (0.01, 0.001))
    failed = requests - len(latency)
    return Group(name, requests, failed, p50, p90, p99, p999, longest, sure_p99, sure_p999)


def _with_failures(latency: NDArray[np.float64], answered: NDArray[np.bool_]) -> float:
    """P99 with failed requests as infinity; no interpolation, which would make NaN of it."""
    return float(np.percentile(np.where(answered, latency, np.inf), 99, method="higher"))
