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
#: A process of the generator that has more to do than this share of the time is what limits a closed loop.
BUSY_LIMIT = 0.9
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
        sure_p90, sure_p99, sure_p999: whether at least five answers lie beyond the percentile.
    """

    name: str
    requests: int
    failed: int
    p50: float
    p90: float
    p99: float
    p999: float
    longest: float
    sure_p90: bool
    sure_p99: bool
    sure_p999: bool


@dataclass(frozen=True)
class Summary:
    """A run in figures.

    Attributes:
        loop: "open" or "closed".
        seconds: that the throughput is taken over: the time of the plan, without the warm-up; in an open loop to the
            last answer if that came later.
        offered: requests a second by plan; 0 in a closed loop.
        throughput: answered requests a second.
        errors: kind of error -> requests.
        overall, classes, lengths, stretches: latency of all, by class, by tokens, by part of a rate that changes.
        p99_or_failed: P99 with each failed request counted as infinitely slow: what a stop line must be held against.
        late_p99_ms, late_max_ms: the generator's own delay, see `Records.lateness_ms`.
        busy: share of the run in which the busiest process of the generator computed or had to wait for a core.
        valid: whether the P99 of that delay kept to its limit (open), or `busy` to its own (closed); otherwise the
            generator was the bottleneck.
        warnings: what to know before the figures are believed.
        cut_s: when the run was cut short, seconds from its start; 0 where it went to its end.
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
    busy: float = 0.0
    stretches: tuple[Group, ...] = field(default=())
    cut_s: float = 0.0


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
        plan: what was to be sent; of a run that was cut short, what had been due by then counts.
        clients: of the closed loop; 0 for the open loop.
        lengths: upper ends of the length groups, tokens, rising.
        late_limit_ms: a P99 of the generator's delay above this makes the run invalid, milliseconds.
        warm_s: requests due (in a closed loop: done) in the first seconds are left out.

    Raises:
        InvalidInput: no record is left.
    """
    warnings = []
    if records.cut_s:
        warnings.append(
            f"INTERRUPTED after {records.cut_s:.1f} of {plan.seconds:.1f} s; {records.given_up} requests that were "
            "under way then are in no figure, and may have been the slow ones"
        )
        plan = plan.until(records.cut_s)
    # In a closed loop a request that began in the warm-up and ended after it is work of the time that counts.
    kept = records.where(np.asarray(records.done if clients else records.scheduled) >= warm_s)
    if not len(kept):
        raise InvalidInput("no request is left to summarise", value=len(records), limit=f"after {warm_s:g} s")
    answered, latency = kept.ok(), kept.latency_ms()
    lateness = kept.lateness_ms()
    late_p99 = percentile_of(lateness, 99)
    seconds, throughput = _throughput(kept, plan, clients, warm_s)
    valid = records.busy <= BUSY_LIMIT if clients else late_p99 <= late_limit_ms
    failed = int((~answered).sum())
    overall = _group("all", kept, np.ones(len(kept), bool))
    errors = Counter(status for status in kept.status if status != OK)
    if not valid:
        words = f"a process of it was busy {100 * records.busy:.0f} % of the time, limit {100 * BUSY_LIMIT:.0f} %"
        if not clients:
            words = f"P99 of its own delay {late_p99:.1f} ms, limit {late_limit_ms:g} ms"
        warnings.append(
            f"INVALID: the generator was the bottleneck: {words}; use more processes, or leave it a core of its own"
        )
    if failed:
        warnings.append(f"{failed} of {len(kept)} requests failed; percentiles are those of the answered ones")
    warnings += [f"{kind}, for example: {records.said[kind]}" for kind in sorted(errors) if kind in records.said]
    if not overall.sure_p99:
        warnings.append(f"{len(kept)} requests are few for a P99: fewer than {_BEYOND} lie beyond it")
    return Summary(
        loop="closed" if clients else "open",
        seconds=seconds,
        offered=0.0 if clients else plan.rate,
        throughput=throughput,
        errors=dict(errors),
        overall=overall,
        classes=tuple(_group(name, kept, np.array(kept.kind) == name) for name in sorted(set(kept.kind))),
        lengths=tuple(_by_length(kept, plan.exact, lengths)),
        p99_or_failed=_with_failures(latency, answered),
        late_p99_ms=late_p99,
        late_max_ms=float(lateness.max()),
        valid=valid,
        warnings=tuple(warnings),
        busy=records.busy,
        stretches=tuple(_by_stretch(kept, plan)),
        cut_s=records.cut_s,
    )


def _throughput(records: Records, plan: Plan, clients: int, warm_s: float) -> tuple[float, float]:
    done = np.asarray(records.done)[records.ok()]
    if clients:  # what ends after the time is over was not done in it
        seconds = plan.seconds - warm_s
        return seconds, float((done <= plan.seconds).sum() / seconds)
    # Not the end of what failed: one request that times out would make the throughput of a minute that of two.
    seconds = max(plan.seconds, float(done.max(initial=0.0))) - warm_s
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


def _by_stretch(records: Records, plan: Plan) -> Iterable[Group]:
    begins = [began for _, began in plan.stretches]
    places = np.searchsorted(begins, records.scheduled, side="right") - 1
    for place, (name, _) in enumerate(plan.stretches):
        if (places == place).any():
            yield _group(name, records, places == place)


def percentile_of(values: NDArray[np.float64], share: float) -> float:
    """A percentile in the values' own unit; NaN when there are none."""
    return float(np.percentile(values, share)) if len(values) else math.nan


def _group(name: str, records: Records, chosen: NDArray[np.bool_]) -> Group:
    answered = chosen & records.ok()
    latency, requests = records.latency_ms()[answered], int(chosen.sum())
    p50, p90, p99, p999, longest = (percentile_of(latency, share) for share in (50, 90, 99, 99.9, 100))
    sure = [len(latency) >= _BEYOND * one_in for one_in in (10, 100, 1000)]
    return Group(name, requests, requests - len(latency), p50, p90, p99, p999, longest, *sure)


def _with_failures(latency: NDArray[np.float64], answered: NDArray[np.bool_]) -> float:
    """P99 with failed requests as infinity; no interpolation, which would make NaN of it."""
    return float(np.percentile(np.where(answered, latency, np.inf), 99, method="higher"))
