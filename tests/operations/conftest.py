"""What several tests of this folder look at: one server with traces and JSON logs, a collector, and Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.operations.collector import Collector, collector
from tests.operations.container import Container, container
from tests.operations.metric_names import door_page, gpu_page, supervisor_page
from tests.operations.prometheus import Prometheus, running_prometheus
from tests.tools.repositories import repository

PATIENT = {"interactive": {"timeout_ms": 60_000}, "background": {"timeout_ms": 60_000}}
#: Both lanes, in small: texts of more than 30 tokens are long.
TWO_LANES: dict[str, Any] = {
    "buckets": [32, 64],
    "model": {"max_tokens": 64},
    "entry": {**PATIENT, "processes": 2},
    "lanes": {"short": {"up_to": 32, "late_from": None}, "long": {"above": 32}},
}


@dataclass(frozen=True)
class Watched:
    """A running server, and where its traces arrive."""

    server: Container
    collector: Collector

    @property
    def target(self) -> str:
        """Its metrics, as Prometheus names the instance."""
        return f"127.0.0.1:{self.server.ports.metrics}"

    @property
    def supervisor(self) -> str:
        """Its launcher's, as Prometheus names the instance."""
        return f"127.0.0.1:{self.server.health_port}"


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server of compose with traces to a collector of the test's, and its log as JSON."""
    built = repository(tmp_path_factory.mktemp("watched"), "deploy.cpu.yaml", **TWO_LANES)
    with collector() as found:
        variables = {"TRACES_URL": found.url, "TRACE_RATE": "0", "LOG_FORMAT": "json", "CANARY_EVERY": "1"}
        with container(built.repository, environment=variables) as started:
            yield Watched(started, found)


@pytest.fixture(scope="package")
def prometheus(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It reads the server and its launcher, and pages of what this machine does not have."""
    with ExitStack() as stack:
        targets = {
            "triton.yml": watched.server.ports.metrics,
            "supervisor.yml": watched.server.health_port,
            "triton-gpu.yml": stack.enter_context(gpu_page()),
            "door.yml": stack.enter_context(door_page()),
            "supervisor-heals.yml": stack.enter_context(supervisor_page()),
        }
        yield stack.enter_context(running_prometheus(tmp_path_factory.mktemp("prometheus"), targets))
