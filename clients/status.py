"""What a server says of itself: its models, versions, queues, times. Reads Triton's replies; asks nothing."""

from __future__ import annotations

import math
import re
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any

from clients.errors import InvalidInput, ServerUnavailable

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_QUANTILES = {"0.5": "p50_ms", "0.99": "p99_ms"}
_PAGE_S = 5.0


@dataclass(slots=True)
class ModelStatus:
    """One version of a model. Counts are since it was loaded; None is what the server does not say."""

    name: str
    version: str
    state: str = ""
    """READY, LOADING, UNLOADING, UNAVAILABLE; empty when the server keeps its index to itself."""
    reason: str = ""
    """Why it is not ready."""
    requests: int = 0
    """Answered requests."""
    failed: int = 0
    """Requests that ended in an error, rejected ones among them."""
    texts: int = 0
    """Texts computed."""
    batches: int = 0
    """Executions."""
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Size of a batch: how many there were; Triton counts only some models'."""
    queue_ms: float | None = None
    """Mean wait in the queue of an answered request, milliseconds."""
    compute_ms: float | None = None
    """Mean time of computing of an answered request, milliseconds."""
    pending: int | None = None
    """Requests in the queue."""
    rejected: int | None = None
    """Requests refused by the queue: too long there, or it was full."""
    p50_ms: float | None = None
    """Half of the last minute's requests took at most this, milliseconds (Triton's summary)."""
    p99_ms: float | None = None
    """99 % of them did."""

    @property
    def mean_batch(self) -> float | None:
        """Texts of a batch, on average."""
        return self.texts / self.batches if self.batches else None


@dataclass(slots=True)
class ServerStatus:
    """A server at one moment."""

    url: str
    version: str
    """Of Triton."""
    models: list[ModelStatus]
    """By name, then version; shorter names first, so that buckets are in the order of their lengths."""
    metrics: bool
    """Whether the /metrics page was read; without it pending, rejected and the quantiles are None."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "models": [{**asdict(one), "mean_batch": one.mean_batch} for one in self.models]}


def read_status(
    url: str,
    server: Mapping[str, Any],
    statistics: Mapping[str, Any],
    index: Mapping[str, Any] | None,
    metrics: str | None,
) -> ServerStatus:
    """Puts the replies of a server together.

    Args:
        url: as the client was given it.
        server: reply to "server".
        statistics: reply to "statistics" for all models.
        index: reply to "index"; None when it was refused.
        metrics: text of the /metrics page, if there is one.
    """
    models: dict[tuple[str, str], ModelStatus] = {}
    for entry in (index or {}).get("models", ()):
        key = (str(entry["name"]), str(entry.get("version", "")))
        models[key] = ModelStatus(*key, state=str(entry.get("state", "")), reason=str(entry.get("reason", "")))
    for given in statistics.get("model_stats", ()):
        key = (str(given["name"]), str(given.get("version", "")))
        _count(models.setdefault(key, ModelStatus(*key)), given)
    if metrics is not None:
        _measure(models, metrics)
    ordered = sorted(models.values(), key=lambda one: (len(one.name), one.name, len(one.version), one.version))
    return ServerStatus(url, str(server.get("version", "")), ordered, metrics is not None)


def _count(status: ModelStatus, given: Mapping[str, Any]) -> None:
    """Fills in the statistics of a model; gRPC's JSON leaves zeros out and writes whole numbers as text."""
    times = given.get("inference_stats", {})
    status.requests = _whole(times, "success", "count")
    status.failed = _whole(times, "fail", "count")
    status.texts = int(given.get("inference_count", 0))
    status.batches = int(given.get("execution_count", 0))
    status.batch_sizes = {
        int(batch.get("batch_size", 0)): _whole(batch, "compute_infer", "count")
        for batch in given.get("batch_stats", ())
    }
    if status.requests:
        status.queue_ms = _whole(times, "queue", "ns") / status.requests / 1e6
        parts = ("compute_input", "compute_infer", "compute_output")
        status.compute_ms = sum(_whole(times, part, "ns") for part in parts) / status.requests / 1e6


def _whole(given: Mapping[str, Any], part: str, key: str) -> int:
    return int(given.get(part, {}).get(key, 0))


def _measure(models: Mapping[tuple[str, str], ModelStatus], metrics: str) -> None:
    """Fills in what only the /metrics page says."""
    wakeups: dict[tuple[str, str], int] = defaultdict(int)
    for name, labels, value in samples(metrics):
        key = (labels.get("model", ""), labels.get("version", ""))
        status = models.get(key)
        if status is None or not math.isfinite(value):  # a summary of nothing is NaN
            continue
        if name == "encoder_lanes_wakeups_total":
            wakeups[key] += int(value)
        elif name == "nv_inference_pending_request_count":
            status.pending = int(value)
        elif name == "nv_inference_request_failure" and labels.get("reason") == "REJECTED":
            status.rejected = int(value)
        elif name == "nv_inference_request_summary_us":
            quantile = _QUANTILES.get(labels.get("quantile", ""))
            if quantile:
                setattr(status, quantile, value / 1000)
    for key, woken in wakeups.items():
        # A version's own wake-ups are rejected requests to Triton: docs/queue.md.
        status = models[key]
        if status.rejected is not None:
            status.rejected, status.failed = max(0, status.rejected - woken), max(0, status.failed - woken)


def samples(page: str) -> list[tuple[str, dict[str, str], float]]:
    """The samples of a Prometheus page: metric, labels, value. Lines that are none are left out."""
    found = (_SAMPLE.match(line) for line in page.splitlines() if not line.startswith("#"))
    given = []
    for one in found:
        if one:
            with suppress(ValueError):  # two words of some other page
                given.append((one[1], dict(_LABEL.findall(one[2] or "")), float(one[3])))
    return given


def check_metrics_url(url: str) -> str:
    """The address of a metrics page.

    Raises:
        InvalidInput: it is no HTTP address.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInput("the address of the metrics is wrong", value=url, limit="http://host:port/metrics")
    return url


def fetch_metrics(url: str, timeout: float = _PAGE_S) -> str:
    """The text of a /metrics page, such as http://127.0.0.1:8002/metrics.

    Args:
        url: its address.
        timeout: longest wait for the server's next bytes, seconds.

    Raises:
        InvalidInput: the address is no HTTP address.
        ServerUnavailable: nothing answers there, or something else than a page of metrics.
    """
    try:
        with urllib.request.urlopen(check_metrics_url(url), timeout=timeout) as answer:  # noqa: S310 - checked
            page = str(answer.read().decode(errors="replace"))
        if not any(_SAMPLE.match(line) for line in page.splitlines()):
            raise ValueError("the page holds no metrics")
        return page
    except (OSError, ValueError, HTTPException) as error:
        raise ServerUnavailable(
            "the metrics cannot be read",
            value=str(error),
            url=url,
            remedy="give --metrics the address of Triton's metrics endpoint (8002 by default), or '' for none",
        ) from None
