"""Real servers for the integration tests: each is built and started once, and stopped by its own pid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from builders.ports import free_ports
from builders.server import TritonServer
from tests.tools.repositories import repository

#: Timeouts that no test runs into by accident on two busy cores.
PATIENT = {
    "interactive": {"timeout_ms": 600_000, "queue_size": 10_000},
    "background": {"timeout_ms": 600_000, "queue_size": 10_000},
}


@pytest.fixture(scope="package")
def cpu_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """deploy.cpu.yaml as it is, but with patient timeouts."""
    built = repository(tmp_path_factory.mktemp("cpu"), "deploy.cpu.yaml", entry=PATIENT)
    # Not longer: test_fuzz.py sends requests that Triton never answers, and a stop would wait for them.
    with TritonServer(built.repository, built.models, ports=free_ports(), exit_timeout_s=5) as server:
        yield server


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """deploy.long.cpu.yaml: all five buckets of production and both lanes, with patient timeouts."""
    built = repository(tmp_path_factory.mktemp("long"), "deploy.long.cpu.yaml", entry=PATIENT)
    with TritonServer(built.repository, built.models, ports=free_ports()) as server:
        yield server
