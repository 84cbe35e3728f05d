"""The entry's own Prometheus metrics: counted in plain Python, told to Triton by one thread.

Telling Triton is a message through shared memory, some 50 µs each, and two threads that do it at once have brought
tritonserver 2.51 down with a segmentation fault in `ModelInstanceState::ProcessMetricRequest`: a metric's message to
the server is one piece of shared memory. So nothing but the publisher's thread ever touches a metric of Triton's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .config import LEVELS, EntryConfig
from .errors import KINDS

#: Label names and values, in the family's order.
Labels = tuple[str, ...]
#: A gauge's family, labels and value.
Sample = tuple[str, Labels, float]


@dataclass(frozen=True)
class Family:
    """A family of metrics; every one also has the labels `model` and `version`, and a gauge `instance`.

    Attributes:
        name: of Prometheus, its unit and `_total` at the end.
        kind: counter, or gauge.
        labels: names of the further labels.
        description: one line.
    """

    name: str
    kind: Literal["counter", "gauge"]
    labels: Labels
    description: str


ArmName = Literal["candidate", "control"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
#: answered: with numbers, in time. refused: the request's own fault, or its client has gone. failed: with an error, or
#: refused what the served version takes. late: not within the deadline. skipped: too many were under way, so that the
#: request was not taken from its batch.
Outcome = Literal["answered", "refused", "failed", "late", "skipped"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_BUCKET = ("lane", "bucket")
REQUESTS = Family(
    "encoder_lanes_requests_total", "counter", _BUCKET, "Requests with a text in this bucket; one may be in several"
)
TEXTS = Family("encoder_lanes_texts_total", "counter", _BUCKET, "Texts (or windows) sent to the bucket model")
CALLS = Family(
    "encoder_lanes_calls_total", "counter", _BUCKET, "Calls of the bucket model; texts per call are the batch size"
)
TOKENS = Family("encoder_lanes_tokens_total", "counter", _BUCKET, "Tokens of those texts, padding not counted")
PADDED = Family("encoder_lanes_padded_tokens_total", "counter", _BUCKET, "Padding sent beside them, tokens")
CALL_SECONDS = Family(
    "encoder_lanes_call_seconds_total", "counter", _BUCKET, "Time that calls of the bucket model took, seconds"
)
FAILED_CALLS = Family("encoder_lanes_failed_calls_total", "counter", _BUCKET, "Calls that the bucket model failed")
BATCHES = Family("encoder_lanes_entry_batches_total", "counter", (), "Dynamic batches that the entry took")
TOKENISE_SECONDS = Family(
    "encoder_lanes_tokenise_seconds_total", "counter", (), "Time that decoding and tokenising took, seconds"
)
REFUSALS = Family("encoder_lanes_refusals_total", "counter", ("kind",), "Requests that the entry refused, by kind")
SWITCHES = Family(
    "encoder_lanes_degrade_switches_total", "counter", ("to",), "Switches to small batches and back, by process"
)
WAKEUPS = Family(
    "encoder_lanes_wakeups_total", "counter", (), "Wake-ups sent to the entry's own queue; Triton rejects each request"
)
WARM = Family(
    "encoder_lanes_warm_processes_total",
    "counter",
    ("of",),
    "Processes of the entry that have made their own first calls; `of` is how many it has",
)
IN_FLIGHT = Family("encoder_lanes_in_flight_texts", "gauge", _BUCKET, "Texts at the bucket model now")
LONG_HELD = Family("encoder_lanes_long_held_texts", "gauge", ("class",), "Texts waiting or running in the long lane")
LONG_BOUND = Family("encoder_lanes_long_bound_texts", "gauge", ("class",), "Most texts the long lane holds")
DEGRADED = Family("encoder_lanes_degraded", "gauge", (), "1 while batches are small because of a backlog")
CANDIDATE = Family("encoder_lanes_candidate_version", "gauge", (), "Version on trial beside this one; 0: none")
CANDIDATE_REQUESTS = Family(
    "encoder_lanes_candidate_requests_total",
    "counter",
    ("arm", "outcome"),
    "Requests of a trial: those for the candidate, and as many for this version as its control",
)
CANDIDATE_SECONDS = Family(
    "encoder_lanes_candidate_seconds_bucket",
    "counter",
    ("arm", "le"),
    "Answers of a trial by the time from their batch's coming, seconds; `le` as in a histogram",
)
FAMILIES = (
    REQUESTS, TEXTS, CALLS, TOKENS, PADDED, CALL_SECONDS, FAILED_CALLS, BATCHES, TOKENISE_SECONDS, REFUSALS, SWITCHES,
    WAKEUPS, WARM, IN_FLIGHT, LONG_HELD, LONG_BOUND, DEGRADED, CANDIDATE, CANDIDATE_REQUESTS, CANDIDATE_SECONDS,
)  # fmt: skip


class Tally:
    """Counts what has happened since the publisher last asked; from any thread, about a microsecond each."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._counts: dict[tuple[str, Labels], float] = {}
        self._lock = threading.Lock()
        self._there = threading.Event()

    def add(self, family: Family, number: float = 1.0, labels: Labels = ()) -> None:
        """Count `number` more; `labels` are the values of the family's labels."""
        self.add_all(((family, number),), labels)

    def add_all(self, counts: Iterable[tuple[Family, float]], labels: Labels = ()) -> None:
        """Count for several families of the same labels at once."""
        with self._lock:
            for family, number in counts:
                key = (family.name, labels)
                self._counts[key] = self._counts.get(key, 0.0) + number
        if not self._there.is_set():
            self._there.set()

    def add_each(self, family: Family, labels: Iterable[Labels]) -> None:
        """Count one more for each of these label values."""
        with self._lock:
            for values in labels:
                key = (family.name, values)
                self._counts[key] = self._counts.get(key, 0.0) + 1.0
        if not self._there.is_set():
            self._there.set()

    def wait(self) -> None:
        """Wait until something was counted, or `wake`."""
        self._there.wait()

    def wake(self) -> None:
        """End a `wait`."""
        self._there.set()

    def taken(self) -> dict[tuple[str, Labels], float]:
        """What was counted since the last time, by the family's name and labels."""
        with self._lock:
            self._there.clear()
            counts, self._counts = self._counts, {}
        return counts


class Publisher:
    """Tells Triton what a tally counted, at most every `interval_s`; sleeps while nothing happens.

    Args:
        make: makes a family of Triton's: (name, description, kind) to a pb_utils.MetricFamily.
        identity: values of the labels `model`, `version` and `instance`. Counters of several processes add up in one
            sample; a gauge is set, so each process has its own.
        config: names the buckets, so that every metric is there, at 0, before the first request.
        tally: what to tell.
        gauges: the gauges' values now; asked from the publisher's thread.
        failed: told an error of Triton's; the thread goes on.
        interval_s: seconds.
    """

    def __init__(
        self,
        make: Callable[[str, str, str], Any],
        identity: tuple[str, str, str],
        config: EntryConfig,
        tally: Tally,
        gauges: Callable[[], Iterable[Sample]],
        failed: Callable[[Exception], None],
        interval_s: float = 1.0,
    ):
        """See the class; makes all metrics, from the thread that calls it. `start` starts its own."""
        self._identity = identity
        self._tally, self._gauges, self._failed, self._interval = tally, gauges, failed, interval_s
        self._families = {family.name: family for family in FAMILIES}
        # Kept here: an increment fails once its family is gone.
        self._made = {family.name: make(family.name, family.description, family.kind) for family in FAMILIES}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._shown: dict[tuple[str, Labels], float] = {}
        for family in FAMILIES:
            for labels in known_labels(family, config):
                self._metric((family.name, labels))
        self._closed = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="metrics", daemon=True)

    def start(self) -> None:
        """Start the thread, which sets the gauges first."""
        self._thread.start()

    def flush(self) -> None:
        """Tell Triton now; for the publisher's thread, and for nobody else once it was started."""
        for key, number in self._tally.taken().items():
            self._metric(key).increment(number)
        for name, labels, value in self._gauges():
            key = (name, labels)
            if self._shown.get(key) != value:
                self._metric(key).set(value)
                self._shown[key] = value

    def hurry(self) -> None:
        """Do not wait until the interval is over this time; from any thread."""
        self._hurry.set()

    def close(self) -> None:
        """End the thread; what was counted last is not told, as its metrics go with the model."""
        self._closed = True
        self._hurry.set()
        self._tally.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _publish(self) -> None:
        while not self._closed:
            try:
                self.flush()
            except Exception as error:  # metrics are never worth a request
                self._failed(error)
            self._tally.wait()
            # What moves a gauge is counted too, so this sleep ends behind the last change.
            self._hurry.wait(self._interval)
            self._hurry.clear()

    def _metric(self, key: tuple[str, Labels]) -> Any:
        if key not in self._metrics:
            family = self._families[key[0]]
            model, version, instance = self._identity
            own = {"instance": instance} if family.kind == "gauge" else {}
            labels = dict(zip(family.labels, key[1], strict=True))
            self._metrics[key] = self._made[key[0]].Metric(labels={"model": model, "version": version, **own, **labels})
        return self._metrics[key]


def known_labels(family: Family, config: EntryConfig) -> Iterable[Labels]:
    """The label values that a family will have."""
    if family.labels == _BUCKET:
        return [(route.lane, str(route.length)) for route in config.buckets]
    if family.labels == ("kind",):
        return [(kind,) for kind in KINDS]
    if family.labels == ("class",):
        return [(level,) for level in LEVELS]
    if family.labels == CANDIDATE_REQUESTS.labels:
        return [(arm, outcome) for arm in ARMS for outcome in OUTCOMES]
    if family.labels == CANDIDATE_SECONDS.labels:
        return []  # some hundred, and most servers never have a trial
    if family.labels == ("of",):
        return [(str(config.processes),)]
    return [("small",), ("normal",)] if family.labels == ("to",) else [()]
