"""A server of docker-compose.yml started by hand: the same launcher, the same flags, tritonserver from the wheel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from builders.ports import Ports, free_ports
from builders.triton_wheel import locate_triton
from tests.tools.repositories import ROOT

DOCKER = ROOT / "docker"
KEY = ("control-key", "0123456789abcdef0123456789abcdef")


def compose() -> dict[str, Any]:
    """docker-compose.yml as it stands, anchors resolved."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return document


def script(name: str) -> ModuleType:
    """A script of docker/ as a module; they are no package, because the image has them in one flat folder."""
    if str(DOCKER) not in sys.path:
        sys.path.insert(0, str(DOCKER))
    return __import__(name)


@dataclass
class Container:
    """A running launcher.

    Attributes:
        process: the launcher.
        ports: where the server listens.
        health_port: where the launcher does.
        repository: what it serves.
        log: what launcher and server print.
    """

    process: subprocess.Popen[bytes]
    ports: Ports
    health_port: int
    repository: Path
    log: Path

    @property
    def server(self) -> int:
        found = script("processes").find_server(parent=self.process.pid)
        assert found is not None, self.log.read_text(encoding="utf-8")
        return int(found)

    def health(self, *options: str) -> tuple[int, str]:
        """Exit code and line of the health check that compose and Kubernetes run."""
        command = [
            *(sys.executable, str(DOCKER / "health.py"), "--repository", str(self.repository)),
            *("--http-port", str(self.ports.http), "--metrics-port", str(self.ports.metrics)),
            *("--health-port", str(self.health_port), "--pid", str(self.server), *options),
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.stderr == ""
        return run.returncode, run.stdout

    def stubs(self, model: str) -> list[int]:
        """Process ids of a model's processes."""
        return list(script("processes").stubs_of(self.server, model))

    def wait_ended(self, timeout: float) -> int:
        return self.process.wait(timeout)


@contextmanager
def container(
    repository: Path, service: str = "triton-cpu", *, environment: Mapping[str, str] | None = None
) -> Iterator[Container]:
    """Run a server's service of docker-compose.yml, wait until it is healthy, stop it if it still runs.

    What a container would give is given by hand: the repository's path, free ports, where the wheel keeps its backend.
    """
    folder = Path(tempfile.mkdtemp(prefix="lanes-container-"))
    key = folder / "control_key"
    key.write_text("=".join(KEY) + "\n", encoding="utf-8")
    ports, install, health_port = free_ports(), locate_triton(), free_ports().http
    run = install.lay_out(folder)
    given = {"CONTROL_KEY_FILE": str(key), "HEALTH_PORT": str(health_port), **(environment or {})}
    values = install.environment(run, {**os.environ, **given})
    values["PATH"] = f"{install.binary.parent}{os.pathsep}{values['PATH']}"
    definition = compose()["services"][service]
    flags = [flag.replace("=/models", f"={repository}") for flag in definition["command"]]
    prefix = f"lanes_container_{os.getpid()}_{ports.http}_"
    local = [
        *(f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}"),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"),
        *(f"--backend-directory={run.backends}", "--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0"),
        # Other tests' servers use /dev/shm too; a container has its own.
        f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(DOCKER / "launch.py"), *flags, *local],
            env=values | {"ON_DEAD_PROCESS": definition["environment"]["ON_DEAD_PROCESS"], **(environment or {})},
            cwd=run.work, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    started = Container(process, ports, health_port, repository, log)
    try:
        _wait_healthy(started)
        yield started
    finally:
        _end(started)
        # A container's /dev/shm would go with it.
        for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108
            region.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_healthy(started: Container, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    said = "nothing"
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            break
        if script("processes").find_server(parent=started.process.pid) is not None:
            code, said = started.health()
            if code == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"not healthy: {said}\n{started.log.read_text(encoding='utf-8')[-4000:]}")


def _end(started: Container) -> None:
    """Two signals: the second one kills tritonserver. What it leaves behind would go with a container."""
    processes = script("processes")
    server = processes.find_server(parent=started.process.pid)
    stubs = [] if server is None else processes.stubs_of(server)
    for _ in range(2):
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
    try:
        started.process.wait(15)
    except subprocess.TimeoutExpired:
        started.process.kill()
        started.process.wait()
        if server is not None:
            os.kill(server, signal.SIGKILL)
    for stub in stubs:
        with suppress(ProcessLookupError, FileNotFoundError):
            if b"triton_python_backend_stub" in Path(f"/proc/{stub}/cmdline").read_bytes():
                os.kill(stub, signal.SIGKILL)
