"""Starts of a server whose models make calls and tell metrics as soon as they can."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import tests.tools
from builders.build import BuildResult
from builders.ports import free_ports
from builders.server import TritonServer
from tests.tools.metrics import counter
from tests.tools.repositories import timed_repository

COMPILER = shutil.which("cc")
#: A server whose entry called the lanes from `initialize` on died in each second start of a busy machine
#: (docs/queue.md).
STARTS = 10


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """Two entry processes, lanes that compute nothing."""
    return timed_repository(tmp_path_factory.mktemp("starts"), 0.0, entry={"processes": 2})


def warm_processes(built: BuildResult, environment: dict[str, str] | None = None) -> float:
    """Start a server, stop it again; how many processes of the entry were warm when it was ready."""
    with TritonServer(built.repository, built.models, ports=free_ports(), environment=environment) as server:
        return counter(server.metrics_url, "encoder_lanes_warm_processes_total", model="encode", of="2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_start_of_a_server_succeeds_and_all_its_processes_are_warm(built: BuildResult) -> None:
    assert [warm_processes(built) for _ in range(STARTS)] == [2] * STARTS


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_start_succeeds_when_the_server_takes_long_between_initialize_and_the_first_safe_call(
    built: BuildResult, tmp_path: Path
) -> None:
    library = tmp_path / "slow_threads.so"
    source = Path(tests.tools.__file__).with_name("slow_threads.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    assert warm_processes(built, {"LD_PRELOAD": str(library)}) == 2
