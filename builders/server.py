"""A real tritonserver as a child process: start it, wait until it answers, stop it and leave nothing behind."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from builders.errors import ServerError
from builders.ports import Ports
from builders.triton_wheel import RunFolder, TritonInstall, locate_triton

EventKind = Literal["loading", "warm-up", "loaded", "unloaded", "failed", "endpoint", "warning", "error", "stopping"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where shm_open puts its files, not a temporary folder)
_POLL_S = 0.1
_WATCH_S = 2.0
# What Triton says on every machine without a GPU, two of them as errors; none means anything there.
_NO_GPU_NOISE = ("CudaDriverHelper has not been initialized", "Unable to allocate pinned system memory", "DCGM unable")
# The child asks the kernel for SIGTERM on its parent's death, then becomes tritonserver. A preexec_fn would do the
# same inside a fork of this process, which may deadlock when other threads (torch, gRPC) hold a lock.
_LAUNCHER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    " os.getppid() == int(sys.argv[1]) or sys.exit('parent is gone'); os.execv(sys.argv[2], sys.argv[2:])"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerEvent:
    """One thing that tritonserver said in its log.

    Attributes:
        kind: what it is about.
        text: the message, possibly of several lines.
        seconds: when it was read, since the server's start.
        model: the model it is about, if it names one.
        version: that model's version, where Triton says it.
    """

    kind: EventKind
    text: str
    seconds: float = 0.0
    model: str | None = None
    version: int | None = None


_LINE = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.+-]+:\d+\] *(.*)", re.DOTALL)
_PROTOBUF_ERROR = re.compile(r"\[libprotobuf ERROR [^\]]*\] (.*)")
_ABOUT_MODELS: tuple[tuple[EventKind, re.Pattern[str]], ...] = (
    ("loading", re.compile(r"loading: (?P<model>.+):(?P<version>-?\d+)$")),
    ("warm-up", re.compile(r"model '(?P<model>[^']+)' instance \S+ is running warmup sample")),
    ("loaded", re.compile(r"successfully loaded '(?P<model>[^']+)'")),
    ("unloaded", re.compile(r"successfully unloaded '(?P<model>[^']+)' version (?P<version>\d+)")),
    ("failed", re.compile(r"failed to load '(?P<model>[^']+)' version (?P<version>\d+): (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"failed to load model '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"failed to poll model '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
)
_ENDPOINT = re.compile(r"Started (?P<what>\w+)(?: Service)? at (?P<where>\S+)")


def parse_log_line(line: str, *, gpu: bool = True) -> ServerEvent | None:
    """The event that a line of tritonserver's log (default format) tells, or None.

    Warm-up is told by a server with `--log-verbose=1` only; otherwise it is inside the time from loading to loaded.

    Args:
        line: without its line end.
        gpu: False drops the errors and warnings that every machine without GPU gives.
    """
    if line.startswith("Signal ("):
        return ServerEvent("stopping", line)
    if found := _PROTOBUF_ERROR.match(line):
        return ServerEvent("error", found[1])
    if not (found := _LINE.match(line)):
        return None
    severity, text = found[1], _unquote(found[2].rstrip())
    for kind, pattern in _ABOUT_MODELS:
        if told := pattern.match(text):
            parts = told.groupdict()
            version = int(parts["version"]) if parts.get("version") else None
            return ServerEvent(kind, (parts.get("text") or text).strip(), model=parts["model"], version=version)
    if severity == "I":
        return ServerEvent("endpoint", text) if _ENDPOINT.match(text) else None
    if not gpu and text.startswith(_NO_GPU_NOISE):
        return None
    return ServerEvent("warning" if severity == "W" else "error", text.strip())


class TritonServer:
    """tritonserver on a model repository, from the wheel nvidia-pytriton.

    Quick start::

        with TritonServer(Path("build/cpu/model_repository"), ["encode"], ports=free_ports()) as server:
            ...  # server.http_url answers; leaving the block stops the server and all model processes

    The server runs in a session of its own, so a terminal's Ctrl-C reaches its parent alone, and stops by itself
    when its parent dies, however that happens (the model processes of a server that was killed outright notice within
    about two seconds, and remove their shared memory).

    Args:
        repository: the model repository.
        models: what to load at start (four at a time, in no order); the others of the repository stay unloaded.
        ports: where to listen.
        host: the address to listen on.
        log_path: where the server's log goes (appended); by default a temporary file, kept if the server failed.
        extra_args: further arguments for tritonserver, after this class's own.
        environment: variables over those of this process.
        on_event: called from a thread for each event of the log; must not block for long.
        ready_timeout_s: how long entering the `with` block waits until all models are ready, seconds.
        exit_timeout_s: how long `stop` lets requests in flight finish, whole seconds.
        shm_bytes: shared memory of one Python model instance at its start, bytes; it grows by the same.

    Raises:
        ServerError: a model is not in the repository, or `models` is empty.
    """

    def __init__(
        self,
        repository: Path,
        models: Sequence[str],
        *,
        ports: Ports | None = None,
        host: str = "127.0.0.1",
        log_path: Path | None = None,
        extra_args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[ServerEvent], None] | None = None,
        ready_timeout_s: float = 300.0,
        exit_timeout_s: int = 30,
        shm_bytes: int = 4 << 20,
    ) -> None:
        """Check the models and keep the settings; nothing starts yet."""
        check_models(repository, models)
        self.repository, self.models = repository.resolve(), tuple(models)
        self.ports, self.host = ports or Ports(), host
        self.ready_timeout_s, self.exit_timeout_s, self.shm_bytes = ready_timeout_s, exit_timeout_s, shm_bytes
        self._log_path, self._log_offset = log_path, 0
        self._own_log: Path | None = None
        self._extra_args, self._environment, self._on_event = tuple(extra_args), dict(environment or {}), on_event
        # Triton's own beginning, so that people recognise the files; the rest makes them this server's.
        self._shm_prefix = f"triton_python_backend_shm_region_{uuid.uuid4().hex[:12]}_"
        self._gpu = has_gpu()
        self._process: subprocess.Popen[bytes] | None = None
        self._launch_error: OSError | None = None
        # Guards the process id: it may be signalled only while the process is not reaped.
        self._lock = threading.RLock()
        self._reaped = False
        self._exited, self._ended = threading.Event(), threading.Event()
        self._pending: set[str] = set(self.models)
        self._faults: list[ServerEvent] = []
        self._was_ready = self._asked_to_stop = False
        self._started_at = self._exited_at = 0.0

    def __enter__(self) -> Self:
        """Start, and wait until every model is ready.

        Raises:
            ServerError: as `start` and `wait_ready`; nothing is left running.
        """
        self.start()
        try:
            self.wait_ready(self.ready_timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id, also its process group's; None before the start."""
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether the process is there, ready or not."""
        return self._process is not None and not self._exited.is_set()

    @property
    def exit_code(self) -> int | None:
        """The exit status of an ended server (negative: killed by that signal), else None."""
        return self._process.returncode if self._process and self._ended.is_set() else None

    @property
    def stopped_cleanly(self) -> bool:
        """Whether the server ended as `stop` asked it to.

        tritonserver catches SIGTERM only once its endpoints run; while it loads, when nothing can be in flight, the
        signal itself ends it.
        """
        return self.exit_code == 0 or (self._asked_to_stop and self.exit_code == -signal.SIGTERM)

    @property
    def http_url(self) -> str:
        """KServe v2 over HTTP, with its scheme."""
        return f"http://{self._client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """KServe v2 over gRPC, host and port."""
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """The Prometheus metrics."""
        return f"http://{self._client_host}:{self.ports.metrics}/metrics"

    @property
    def log_path(self) -> Path | None:
        """The server's log; None before the start without an own path."""
        return self._log_path or self._own_log

    @property
    def _client_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104

    def start(self) -> None:
        """Start the process and return; `wait_ready` waits for it.

        Raises:
            ServerError: it was started before, the wheel cannot be used here, a port is taken, or shared memory is
                too small.
        """
        if self._process is not None:
            raise ServerError("this server was started before", remedy="make a new TritonServer")
        install = locate_triton()
        check_shared_memory(self.repository, self.models, self.shm_bytes)
        self.ports.check_free(self.host)
        folder = Path(tempfile.mkdtemp(prefix="triton-run-"))
        try:
            run = install.lay_out(folder)
            environment = install.environment(run, {**os.environ, **self._environment})
            log = self._open_log()
            launched = threading.Event()
            self._started_at = time.monotonic()
            # The kernel's "parent" is a thread: the one that started the server must live as long as the server.
            threading.Thread(
                target=self._supervise,
                args=(self._command(install, run), environment, run, log, launched),
                name="tritonserver",
                daemon=True,
            ).start()
            launched.wait()
        finally:
            if self._process is None:
                shutil.rmtree(folder, ignore_errors=True)
        if self._launch_error is not None:
            raise ServerError(f"tritonserver cannot be started ({self._launch_error})", value=str(install.binary))

    def wait_ready(self, timeout: float) -> None:
        """Wait until every model and the metrics answer; the server is left running on a timeout.

        Args:
            timeout: seconds.

        Raises:
            ServerError: the server ended (with the reason from its log), or `timeout` passed.
        """
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise ServerError(
                    "models are not ready in time",
                    value=sorted(self._pending),
                    limit=f"{timeout:g} s",
                    remedy=f"wait longer, or see {self.log_path}",
                )
            self._exited.wait(_POLL_S)

    def is_ready(self) -> bool:
        """Ask once, over HTTP, for every model that was not ready yet, then for the metrics (the last to start)."""
        for model in sorted(self._pending):
            if not self._answers(self.ports.http, f"/v2/models/{urllib.parse.quote(model, safe='')}/ready"):
                return False
            self._pending.discard(model)
        # The process is asked too: whoever else took the port meanwhile would answer as well.
        self._was_ready = self._answers(self.ports.metrics, "/metrics") and self.is_running
        return self._was_ready

    def raise_if_ended(self) -> None:
        """Raise what ended the server, if it is not running any more.

        Raises:
            ServerError: with the readable reason from the log.
        """
        if self._process is None:
            raise ServerError("the server was not started", remedy="call start()")
        if self._exited.is_set():
            self._ended.wait()
            raise self._failure()

    def stop(self) -> None:
        """Stop: requests in flight are answered, for at most `exit_timeout_s`; after that it is killed.

        On return the server, its model processes, their shared memory and the temporary folder are gone.
        """
        if self._process is None:
            return
        self._asked_to_stop = True
        self._signal(signal.SIGTERM)
        # Triton looks once a second, and unloads after the requests: some seconds over its own timeout.
        if not self._ended.wait(self.exit_timeout_s + 10):
            self.kill()
        if self._own_log is not None and self.stopped_cleanly:
            self._own_log.unlink(missing_ok=True)

    def kill(self, *, wait: bool = True) -> None:
        """Kill the server and its model processes now; requests in flight are lost.

        Args:
            wait: return when they are gone. A signal handler must not: it may have interrupted the very same wait.
        """
        self._signal(signal.SIGKILL)
        if wait and self._process is not None:
            self._ended.wait(10)

    # ── the process ──────────────────────────────────────────────────────────────────────────────────────────────

    def _command(self, install: TritonInstall, run: RunFolder) -> list[str]:
        options = {
            "model-repository": self.repository,
            "backend-directory": run.backends,
            "model-control-mode": "explicit",
            "http-address": self.host,
            "http-port": self.ports.http,
            "grpc-address": self.host,
            "grpc-port": self.ports.grpc,
            "metrics-address": self.host,
            "metrics-port": self.ports.metrics,
            # The P50 and P99 that Triton itself measures.
            "metrics-config": "summary_latencies=true",
            "allow-gpu-metrics": str(self._gpu).lower(),
            # Strict, a new version that fails to load turns /v2/health/ready to 400 while the old one serves on, and
            # an orchestrator would take a healthy server away. A failed load at start ends the server either way.
            "strict-readiness": "false",
            "exit-timeout-secs": self.exit_timeout_s,
        }
        if not self._gpu:
            options["pinned-memory-pool-byte-size"] = 0
        python = {
            "shm-region-prefix-name": self._shm_prefix,
            "shm-default-byte-size": self.shm_bytes,
            "shm-growth-byte-size": self.shm_bytes,
        }
        return [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())),
            str(install.binary),
            "--disable-auto-complete-config",
            *(f"--{name}={value}" for name, value in options.items()),
            *(f"--load-model={model}" for model in self.models),
            *(f"--backend-config=python,{name}={value}" for name, value in python.items()),
            *self._extra_args,
        ]

    def _open_log(self) -> int:
        if self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            # Triton and each of its model processes write to it: only appending keeps them from overwriting.
            log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._log_offset = os.fstat(log).st_size
            return log
        log, name = tempfile.mkstemp(prefix="tritonserver-", suffix=".log")
        os.close(log)
        self._own_log, self._log_offset = Path(name), 0
        return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _supervise(
        self, command: list[str], environment: dict[str, str], run: RunFolder, log: int, launched: threading.Event
    ) -> None:
        try:
            process = self._process = subprocess.Popen(
                command, env=environment, cwd=run.work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._launch_error = error
            return
        finally:
            os.close(log)
            launched.set()
        follower = threading.Thread(target=self._follow, args=(process.pid,), name="tritonserver-log", daemon=True)
        follower.start()
        # Ended but not reaped, the process keeps its id, so that the group's number cannot be anyone else's yet.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _end_group(process.pid)
        with self._lock:
            process.wait()
            self._reaped = True
        for region in SHARED_MEMORY.glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(run.work.parent, ignore_errors=True)
        self._exited_at = time.monotonic() - self._started_at
        self._exited.set()
        follower.join()
        self._ended.set()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._process is None or self._reaped:
                return
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                # The server alone: it ends its model processes itself, after their last answers.
                os.kill(self._process.pid, number)

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────

    def _answers(self, port: int, path: str) -> bool:
        # http.client reads no proxy settings: this is always the machine itself.
        connection = http.client.HTTPConnection(self._client_host.strip("[]"), port, timeout=2.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _follow(self, server: int) -> None:
        path = self.log_path
        if path is None:
            return
        watch, next_watch = _ModelProcesses(), 0.0
        with path.open("rb") as log:
            log.seek(self._log_offset)
            rest = b""
            while True:
                # Asked before reading: what was written before the end is then surely read.
                over = self._exited.is_set()
                *lines, rest = (rest + log.read()).split(b"\n")
                if over and rest:
                    lines.append(rest)
                for line in lines:
                    if event := parse_log_line(line.decode("utf-8", "replace"), gpu=self._gpu):
                        self._tell(event)
                if over:
                    return
                if time.monotonic() >= next_watch:
                    next_watch = time.monotonic() + _WATCH_S
                    for event in watch.died(server):
                        self._tell(event)
                self._exited.wait(_POLL_S)

    def _tell(self, event: ServerEvent) -> None:
        seconds = time.monotonic() - self._started_at
        event = ServerEvent(event.kind, event.text, seconds, event.model, event.version)
        if event.kind in ("failed", "error"):
            # The last ones are enough for a reason; a server that runs for weeks must not collect them all.
            self._faults = [*self._faults[-49:], event]
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            _log.exception("on_event failed; it gets no more events")
            self._on_event = None

    def _failure(self) -> ServerError:
        tail = "" if self.log_path is None else self.log_path.read_text("utf-8", "replace")[-20_000:]
        # What failed long before the end of a server that was ready did not end it.
        since = self._exited_at - 60 if self._was_ready else 0.0
        reason = explain([fault for fault in self._faults if fault.seconds >= since], tail)
        hint = next((remedy for sign, remedy in _HINTS if sign in reason), None)
        see = f"the whole log: {self.log_path}"
        return ServerError(
            f"tritonserver ended ({_how(self.exit_code)}): {reason}", remedy=f"{hint} ({see})" if hint else see
        )


_HINTS = (
    ("unable to find backend library", "the wheel has the Python backend only: serve deploy.cpu.yaml, or a container"),
    ("ModuleNotFoundError", f"install it into {sys.prefix}, which the models use"),
    ("is not healthy", "the model's process died in native code or was killed: look for memory, then run it alone"),
    ("already in use", "choose other ports, or stop what listens there"),
)


def explain(faults: Iterable[ServerEvent], log: str) -> str:
    """The reason why a server ended, in as few lines as tell it.

    Args:
        faults: the events of kind "failed" and "error", in order.
        log: the end of the log, for a server that died without any.
    """
    faults = list(faults)
    told = [fault for fault in faults if fault.kind == "failed"]
    # Protobuf tells the line of a configuration that "Poll failed" merely names; the rest repeats what failed.
    told += [fault for fault in faults if fault.kind == "error" and (not told or "text-format" in fault.text)]
    reasons = []
    for fault in told:
        text = _compact(fault.text)
        where = "" if fault.version is None else f" version {fault.version}"
        reasons.append(text if fault.model is None else f"model {fault.model!r}{where}: {text}")
    if not reasons:
        # Only the words after "creating server" or the last lines remain.
        _, found, last = log.rpartition("\nerror: ")
        lines = (last if found else log).strip().splitlines()
        reasons = [_compact("\n".join(lines if found else lines[-5:]))] if lines else ["it wrote no log"]
    return "; ".join(dict.fromkeys(reasons))


def check_models(repository: Path, models: Sequence[str]) -> None:
    """Make sure that each model has a configuration in the repository.

    Raises:
        ServerError: naming the models that are there.
    """
    if not repository.is_dir():
        raise ServerError("the model repository is no folder", value=str(repository), remedy="make render")
    there = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise ServerError("no model to load", limit=f"some of {', '.join(there) or 'none'}")
    for model in models:
        if model not in there:
            raise ServerError(
                f"no such model in {repository}", value=model, limit=f"one of {', '.join(there) or 'none'}"
            )


def check_shared_memory(repository: Path, models: Sequence[str], shm_bytes: int) -> None:
    """Make sure that /dev/shm can hold the regions of all Python model instances.

    Triton sizes them without reserving: where it is too small, a model process dies of SIGBUS under load, without a
    word in the log.

    Raises:
        ServerError: too little is free.
    """
    instances = sum(_python_instances(repository / model / "config.pbtxt") for model in models)
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, instances * shm_bytes
    if free < needed:
        raise ServerError(
            f"too little shared memory is free in {SHARED_MEMORY}",
            value=f"{free / 2**20:.0f} MiB",
            limit=f"at least {needed / 2**20:.0f} MiB for {instances} Python model instances",
            remedy="docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm, or fewer entry.processes",
        )


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is handed to this machine or container (a device file; no driver is asked)."""
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*"))


def _python_instances(config: Path) -> int:
    # Here, not above: importing it costs half a second, and only a start needs it.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        model = text_format.Parse(config.read_text("utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except text_format.ParseError:
        return 0  # Triton will say where.
    if model.backend != "python":
        return 0
    return sum(max(1, group.count) for group in model.instance_group) or 1


@dataclass(frozen=True)
class _Member:
    pid: int
    parent: int
    zombie: bool


def _group_members(group: int) -> list[_Member]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text("utf-8", "replace")
        except OSError:
            continue
        # The command's name, in brackets, may hold anything.
        state, parent, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group:
            members.append(_Member(int(entry.name), int(parent), state in "ZX"))
    return members


def _end_group(group: int) -> None:
    """Kill what is left of the group of an ended, not yet reaped server, and wait until it is gone."""
    for _ in range(100):
        if all(member.zombie for member in _group_members(group)):
            return
        os.killpg(group, signal.SIGKILL)
        time.sleep(0.02)


class _ModelProcesses:
    """Notices a model process that died.

    Triton 2.51 says nothing of it: it does not start another, and keeps the model "ready" while each request fails.
    The server leaves such a child unreaped; one that it is just unloading is so for a moment only, hence two looks.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._suspects: set[int] = set()
        self._told: set[int] = set()

    def died(self, server: int) -> list[ServerEvent]:
        children = [member for member in _group_members(server) if member.parent == server]
        for child in children:
            if not child.zombie and child.pid not in self._names:
                self._names[child.pid] = _instance_name(child.pid)
        zombies = {child.pid for child in children if child.zombie and self._names.get(child.pid)}
        sure = (zombies & self._suspects) - self._told
        self._suspects = zombies
        self._told = (self._told | sure) & zombies
        self._names = {child.pid: self._names.get(child.pid, "") for child in children}
        return [self._event(self._names[pid]) for pid in sorted(sure)]

    @staticmethod
    def _event(instance: str) -> ServerEvent:
        model = re.sub(r"_\d+_\d+$", "", instance)
        text = (
            f"a process of this model died ({instance}): its requests fail, though it counts as ready."
            " To do: touch a file of the model and load it again, or start the server anew"
        )
        return ServerEvent("error", text, model=model)


def _instance_name(stub: int) -> str:
    """The name that Triton gave the instance, or "" for a process that is no stub."""
    try:
        arguments = Path(f"/proc/{stub}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    named = [argument for argument in arguments[1:] if re.fullmatch(r".+_\d+_\d+", argument)]
    return named[-1] if arguments[0].endswith("triton_python_backend_stub") and named else ""


def _unquote(text: str) -> str:
    if not (text.startswith('"') and text.endswith('"')):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _compact(text: str) -> str:
    """A message of Triton on one line; of a Python traceback, only the user's own places stay."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith("<frozen ")]
    return re.sub(r" At: ", " at ", re.sub(r"^(Internal|Invalid argument): ", "", " ".join(kept))).rstrip("; ")


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
