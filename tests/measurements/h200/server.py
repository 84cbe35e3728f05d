"""tritonserver of the packed Python, and what nvidia-smi says meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any


def clean_environment() -> dict[str, str]:
    """The environment without what env.sh of the packed Python put in, for the machine's own Python."""
    home = os.environ.get("PYTHONHOME")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TRITON_BACKENDS", "CUDA_MODULE_LOADING")
    }
    if home:
        root = str(Path(home).parent)
        environment["PATH"] = ":".join(part for part in os.environ["PATH"].split(":") if not part.startswith(root))
    return environment


class Server:
    """One tritonserver on a repository, explicit model control."""

    def __init__(self, repository: Path, models: list[str], log: Path, first_port: int = 8100):
        self.repository, self.models, self.log = repository, models, log
        self.http, self.grpc_port, self.metrics = first_port, first_port + 1, first_port + 2
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float) -> float:
        """Start and wait until all models are ready; returns the seconds."""
        gpu = shutil.which("nvidia-smi") is not None
        options: dict[str, Any] = {
            "model-repository": self.repository, "backend-directory": os.environ["TRITON_BACKENDS"],
            "model-control-mode": "explicit", "http-port": self.http, "grpc-port": self.grpc_port,
            "metrics-port": self.metrics, "allow-gpu-metrics": str(gpu).lower(), "strict-readiness": "false",
            "exit-timeout-secs": 5, "metrics-config": "summary_latencies=true", "model-load-thread-count": 8,
        }  # fmt: skip
        if not gpu:
            options["pinned-memory-pool-byte-size"] = 0
        binary = shutil.which("tritonserver")
        if binary is None:
            raise RuntimeError("no tritonserver on the PATH: source env.sh of the packed Python")
        command = [binary, "--disable-auto-complete-config", *(f"--{name}={value}" for name, value in options.items())]
        command += [f"--load-model={model}" for model in self.models]
        command += ["--backend-config=python,shm-default-byte-size=4194304"]
        begin = time.monotonic()
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        waiting = set(self.models)
        while waiting:
            if self.process.poll() is not None or time.monotonic() - begin > timeout:
                text = self.log.read_text(errors="replace")
                bad = [line for line in text.splitlines() if line[:1] == "E" or "Error" in line][-12:]
                code = self.process.poll()
                self.stop()
                about = f"tritonserver is not ready (exit status {code}): {sorted(waiting)}"
                raise RuntimeError("\n".join([about, *(bad or [text[-2000:]])]))
            waiting = {model for model in waiting if not self._ready(model)}
            time.sleep(0.2)
        self.wait_warm(timeout)
        return time.monotonic() - begin

    def wait_warm(self, timeout: float) -> None:
        """Wait until every process of the entry has made its first calls."""
        limit = time.monotonic() + timeout
        sample = re.compile(r'^encoder_lanes_warm_processes_total\{.*\bof="(\d+)".*\} (\S+)$', re.M)
        while not all(float(warm) >= int(of) for of, warm in sample.findall(self.text())):
            if time.monotonic() > limit:
                raise RuntimeError("the entry's processes do not become warm")
            time.sleep(0.1)

    def text(self) -> str:
        """The metrics; empty while they do not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, OSError):
            return 'encoder_lanes_warm_processes_total{of="1"} 0'

    def _ready(self, model: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/models/{model}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def load_model(self, model: str) -> None:
        """Load (again) what lies in the repository; waits until it serves."""
        address = f"http://127.0.0.1:{self.http}/v2/repository/models/{model}/load"
        request = urllib.request.Request(address, data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{model} was not loaded: {error.read().decode()[:1500]}") from error
        self.wait_warm(60)

    def stop(self) -> None:
        """Stop it and all its model processes."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def engine_metrics(server: Server) -> dict[str, dict[str, float]]:
    """The lanes' engine metrics: name to model to value."""
    time.sleep(1.2)  # they are told once a second
    text = server.text()
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^encoder_lanes_engine_(\w+)\{(.*)\} (\S+)$", text, re.M):
        model = re.search(r'model="([^"]+)"', labels)
        found.setdefault(name, {})[model[1] if model else "?"] = float(value)
    return found


#: CPU time so far in seconds, by group and by process: its id, and when it was started.
CpuTimes = dict[str, dict[tuple[int, int], float]]


def cpu_times() -> CpuTimes:
    """CPU time of the server's, the entry's and the lanes' processes and of the service "before"."""
    tick = os.sysconf("SC_CLK_TCK")
    found: CpuTimes = {group: {} for group in ("server", "entry", "lanes", "before")}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            program = Path(command.split("\0")[0]).name
            group = "before" if "torch_side" in command else "server" if program == "tritonserver" else ""
            if program == "triton_python_backend_stub":
                group = "entry" if "/encode/" in command else "lanes"
            if group:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[group][int(folder.name), int(fields[19])] = (int(fields[11]) + int(fields[12])) / tick
    return found


def used_cores(before: CpuTimes, after: CpuTimes, seconds: float) -> dict[str, float | None]:
    """Cores that each group used between two readings; None where a process of it ended, whose last time nobody knows.

    Args:
        before: the first reading.
        after: the second one; a process that began after the first counts from its start.
        seconds: between them.
    """
    cores: dict[str, float | None] = {}
    for group, times in after.items():
        ended = before[group].keys() - times.keys()
        used = sum(now - before[group].get(process, 0.0) for process, now in times.items())
        cores[group] = None if ended else round(used / seconds, 2)
    return cores


def lane_pids(model: Path) -> list[int]:
    """Processes of a Python model, by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"triton_python_backend_stub" in words[0] and any(str(model).encode() + b"/" in word for word in words):
            found.append(int(path.parent.name))
    return found


class Sampler:
    """GPU utilisation and memory by nvidia-smi, five times a second, while the block runs; nothing without a GPU."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        if shutil.which("nvidia-smi"):
            columns = "--query-gpu=utilization.gpu,memory.used"
            query = ["nvidia-smi", columns, "--format=csv,noheader,nounits", "-lms", "200"]
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            parts = line.split(",")
            if len(parts) == 2:
                self.rows.append((float(parts[0]), float(parts[1])))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def summary(self) -> dict[str, Any]:
        """Mean utilisation of the last three quarters of the block, since the load starts a bit later; peak memory."""
        rows = self.rows[(len(self.rows) // 4) : -3]
        if not rows:
            return {"gpu_utilisation": None, "gpu_memory_mib": None}
        used = sorted(row[0] for row in rows)
        return {
            "gpu_utilisation": sum(used) / len(used) / 100, "gpu_utilisation_median": used[len(used) // 2] / 100,
            "gpu_memory_mib": max(row[1] for row in rows),
        }  # fmt: skip

    def line(self) -> str:
        """For the terminal."""
        found = self.summary()
        if found["gpu_utilisation"] is None:
            return "no GPU seen"
        return f"GPU {found['gpu_utilisation']:.0%}, {found['gpu_memory_mib']:.0f} MiB"

    @staticmethod
    def once() -> dict[str, Any]:
        """Memory now: of the GPU and, where the driver tells it, by process."""
        if not shutil.which("nvidia-smi"):
            return {}

        def ask(what: str, columns: str) -> list[list[str]]:
            command = ["nvidia-smi", f"--query-{what}={columns}", "--format=csv,noheader,nounits"]
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
            return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]

        processes = {}
        for row in ask("compute-apps", "pid,used_memory"):
            if len(row) == 2 and row[1].isdigit():
                processes[_name(row[0])] = int(row[1])
        return {"used_mib": [row[0] for row in ask("gpu", "memory.used")], "processes_mib": processes}


def _name(pid: str) -> str:
    """The model that a process serves, or its command."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return pid
    found = re.search(r"/(encode\w*)/\d+/", " ".join(words))
    return f"{found[1] if found else Path(words[0]).name} ({pid})"
