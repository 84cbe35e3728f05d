"""The door's own metrics, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60)
_BY_ANSWER = ("route", "status", "priority")


class DoorMetrics:
    """Counts and times; `status` is the HTTP code, 499 for a client that went away."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        """Starts at zero."""
        self.registry = CollectorRegistry()
        self.requests = Counter("door_requests", "Requests answered.", _BY_ANSWER, registry=self.registry)
        self.seconds = Histogram(
            "door_request_duration_seconds",
            "From the request's head to its answer.",
            _BY_ANSWER,
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge("door_requests_in_flight", "Requests under way.", ("route",), registry=self.registry)
        self.texts = Counter("door_texts", "Texts computed.", ("model",), registry=self.registry)
        self.tokens = Counter("door_tokens", "Tokens the models read.", ("model",), registry=self.registry)
        self.cut = Counter("door_cut_tokens", "Tokens cut off.", ("model",), registry=self.registry)
        self.limited = Counter(
            "door_rate_limited", "Requests refused because a key was over its rate.", ("limit",), registry=self.registry
        )
        self.ready = Gauge(
            "door_model_ready", "Whether a model was ready when last asked.", ("model",), registry=self.registry
        )

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
