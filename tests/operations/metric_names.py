"""Every metric that the parts of this project export, by the names in their code; and a page of those without a source.

A CPU has no GPU lanes, and no server of these tests has a door or a supervisor that heals: for them a small HTTP server
answers with a page whose names come from the code and whose counters rise with every look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from builders.health import ModelStatus, Status, health_endpoint
from builders.health import metrics_text as supervisors_text
from builders.serving.entry.metrics import ARMS, CANDIDATE_SECONDS, FAMILIES
from builders.serving.entry.trial import EDGES
from builders.serving.lane.metrics import METRICS, PREFIX
from clients.door.metrics import DoorMetrics
from tests.operations.container import script
from tests.tools.played import playing
from tests.tools.repositories import ROOT

#: Triton's own, on 2.51: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md.
TRITON = {
    *("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count"),
    *("nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_pending_request_count"),
    *("nv_inference_request_summary_us", "nv_inference_queue_summary_us"),
    *("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"),
}
#: Of its GPU's; a test finds the names in the server's library.
GPU = {"nv_gpu_utilization": 0.5, "nv_gpu_memory_total_bytes": 150e9, "nv_gpu_memory_used_bytes": 50e9}
ENTRY = {family.name for family in FAMILIES}
LANE = {PREFIX + name for name in METRICS}


def _door_names() -> set[str]:
    return {sample.name for family in _door().registry.collect() for sample in family.samples}


def _door() -> DoorMetrics:
    """The door's metrics, after one request of each kind."""
    metrics = DoorMetrics()
    _count(metrics)
    return metrics


def _count(metrics: DoorMetrics) -> None:
    for status in ("200", "429", "503"):
        labels = ("/v1/embeddings", status, "interactive")
        metrics.requests.labels(*labels).inc()
        metrics.seconds.labels(*labels).observe(0.02)
    metrics.in_flight.labels("/v1/embeddings").set(1)
    for counter in (metrics.texts, metrics.tokens, metrics.cut):
        counter.labels("encode").inc(3)
    metrics.limited.labels("requests").inc()
    metrics.ready.labels("encode").set(1)


#: What is written by rules.yml.
RECORDED = {
    rule["record"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
SUPERVISOR = set(re.findall(r"^# TYPE (\S+)", supervisors_text(Status(True, True)), re.MULTILINE))
LAUNCHER = set(re.findall(r"^# TYPE (\S+)", script("endpoint").metrics_text({}, 0.0), re.MULTILINE))
NAMES = TRITON | set(GPU) | ENTRY | LANE | SUPERVISOR | LAUNCHER | _door_names() | {"up", "ALERTS"}


def names_in(text: str) -> set[str]:
    """Names of series in PromQL."""
    bare = re.sub(r'"[^"]*"', "", text)
    bare = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", "", bare)
    return set(re.findall(r"\b(?:nv_|encoder_lanes[_:]|door_)[a-z0-9_:]+|\bup\b|\bALERTS\b", bare))


@contextmanager
def gpu_page() -> Iterator[int]:
    """A server with a GPU, and with a version on trial, as far as its metrics go; its port."""
    looks = [0]

    def page() -> bytes:
        looks[0] += 1
        lines = [f'{name}{{gpu_uuid="GPU-1"}} {value}' for name, value in GPU.items()]
        for name in METRICS:
            value = looks[0] * 10 if name.endswith("_total") else 1
            lines.append(f'{PREFIX}{name}{{model="encoder_128",version="1"}} {value}')
        for arm in ARMS:
            for edge in (*map(str, EDGES), "+Inf"):
                lines.append(f'{CANDIDATE_SECONDS.name}{{model="encode",arm="{arm}",le="{edge}"}} {looks[0]}')
        return ("\n".join(lines) + "\n").encode()

    with _served(page) as port:
        yield port


@contextmanager
def door_page() -> Iterator[int]:
    """A door, as far as its metrics go: the real object behind its page; its port."""
    metrics = _door()

    def page() -> bytes:
        _count(metrics)
        return metrics.page()

    with _served(page) as port:
        yield port


@contextmanager
def supervisor_page() -> Iterator[int]:
    """The supervisor of a `serve` with one model that is healed again and again: its real endpoint; its port."""
    looks = [0]

    def status() -> Status:
        looks[0] += 1
        return Status(True, True, (ModelStatus("encoder_128", True, heals=looks[0], canary="ok", canary_seconds=0.01),))

    with health_endpoint("127.0.0.1", 0, status) as url:
        yield int(url.rpartition(":")[2])


@contextmanager
def _served(page: Any) -> Iterator[int]:
    with playing(lambda asked: (200, page()), content_type="text/plain; version=0.0.4") as port:
        yield port
