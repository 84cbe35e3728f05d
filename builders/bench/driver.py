"""What the bench needs of a server: start it, where to call it, stop it, how much CPU its processes took."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Protocol

from builders.errors import BuilderError
from builders.server_process import ended_how
from builders.source import EncoderSource
from clients.load.page import BENCH_EXTRA
from clients.load.target import Target

_START_S = 300.0
_STOP_S = 20.0
# The child asks the kernel for SIGTERM on its parent's death, then becomes the server: a bench that is killed outright
# leaves no server behind. Not the launcher of tritonserver, which also raises the stack of every thread.
_LAUNCHER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    " os.getppid() == int(sys.argv[1]) or sys.exit('parent is gone'); os.execv(sys.argv[2], sys.argv[2:])"
)


class BenchError(BuilderError):
    """A server of the bench did not start or answer, or what was asked for cannot be measured."""


class Driver(Protocol):
    """A server under test."""

    name: str
    """Short, for the first column of a table."""
    about: str
    """What it is, one clause: engine, batch, protocol."""
    gpus: int
    """GPUs that it computes on; 0 without one."""

    @property
    def metrics_url(self) -> str | None:
        """Triton's metrics page; None where there is none."""
        ...

    @property
    def pid(self) -> int | None:
        """Root of its process tree while it runs."""
        ...

    def start(self) -> Target:
        """Starts it, waits until it answers, and says how to call it.

        Raises:
            BuilderError: it did not come up; nothing is left running.
        """
        ...

    def ended(self) -> str | None:
        """How it ended by itself after it had started, with the end of its log; None as long as it runs."""
        ...

    def stop(self) -> None:
        """Stops it and all its processes; does nothing when it does not run."""
        ...


@dataclass(frozen=True)
class Cpu:
    """CPU time of a process tree so far, seconds, and the processes it is of."""

    seconds: float
    processes: int


def cpu_of(pid: int | None) -> Cpu:
    """User and system time of a process and everything below it; what ended meanwhile is not in it.

    Raises:
        BenchError: psutil is not installed.
    """
    try:
        import psutil
    except ImportError:
        raise BenchError("psutil is not installed", remedy=BENCH_EXTRA) from None
    if pid is None:
        return Cpu(0.0, 0)
    total, count = 0.0, 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total, count = total + times.user + times.system, count + 1
    return Cpu(total, count)


def busy_share(seconds: float = 0.5) -> float:
    """Share of all cores that the whole machine takes right now, of 1: before a bench, what else runs on it."""
    import psutil

    return float(psutil.cpu_percent(interval=seconds)) / 100


def plain_pooling(source: EncoderSource) -> str:
    """ "mean" or "cls": what the servers that this project is compared with can do.

    Raises:
        BenchError: the model is another one.
    """
    pooling = source.task.pooling
    if source.task.name != "embedding" or pooling not in (("mean",), ("cls",)):
        raise BenchError(
            "the other servers of the bench cannot serve this model",
            value=f"{source.task.name}, pooling {' + '.join(pooling) or 'none'}",
            limit="embedding, pooled by mean or cls",
            remedy="measure the product alone: --no-naive, and no --peer-venv",
        )
    return pooling[0]


def text_limit(source: EncoderSource) -> int:
    """Where every server cuts a text, tokens: at the product's limit, or at the model's own positions below it.

    By themselves the others would go by files of the model that the product's settings overrule: MiniLM's ask
    sentence-transformers to read half of what the model can, and a server that reads half a text is not compared.
    """
    return min(source.max_tokens, source.architecture.positions)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that goes away, end the block as Ctrl-C does, so that no server is left."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        # What is ignored stays so: under nohup the bench goes on without its terminal.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Child:
    """A server as a child process in a process group of its own; its output goes to a file, kept when it failed.

    Start it from a thread that lives as long as it is to run: the server ends with the thread.

    Args:
        command: the program and its arguments.
        ready: says whether it answers.
        environment: variables over those of this process.
        folder: working directory; this process's own by default.
        start_s: how long it may take to answer, seconds.
        log: file of its output, appended to; a temporary one by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        start_s: float = _START_S,
        log: Path | None = None,
    ):
        """See the class."""
        self.command, self._ready, self._folder, self._start_s = list(command), ready, folder, start_s
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted_log, self._log, self._kept_before = log, Path(), False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts it and waits until it answers.

        Raises:
            BenchError: it cannot be started, ended, or did not answer in time; the end of its output is in the error.
            OSError: its log cannot be made.
        """
        program = shutil.which(self.command[0])
        if program is None:
            raise BenchError("the server cannot be started: there is no such program", value=self.command[0])
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), program]
        self._log = self._wanted_log or _temporary_log()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # Of a start that failed or of a server that died, which somebody was told to read.
        self._kept_before = has_content(self._wanted_log)
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [*launcher, *self.command[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
            except OSError as error:
                if not self._kept_before:
                    self._log.unlink()
                raise BenchError("the server cannot be started", value=self.command[0], limit=error.strerror) from None
        until = time.monotonic() + self._start_s
        while not self._ready():
            code = self._exit_code()
            if code is not None or time.monotonic() > until:
                self._stop(keep_log=True)  # the error names it
                what = "did not answer in time" if code is None else f"ended by itself ({ended_how(code)})"
                raise BenchError(f"the server {what}", value=" ".join(self.command), limit=_end_of(self._log))
            time.sleep(0.2)

    def ended(self) -> str | None:
        """See `Driver`; `stop` then keeps the log."""
        code = self._exit_code()
        if code is None or self._process is None:
            return None
        # What is left of it would go on beside the other servers. Its leader is not reaped yet: the number is its own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return f"ended by itself ({ended_how(code)}); {_end_of(self._log)}"

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to what is left of its group, even when a second Ctrl-C cuts the wait short."""
        self._stop(keep_log=self._exit_code() is not None)

    def _exit_code(self) -> int | None:
        """Of a server that ended by itself, negative by a signal. It is not reaped: see `_stop`."""
        if self._process is None:
            return None
        try:
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # where SIGCHLD is ignored, the kernel has reaped it
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _stop(self, *, keep_log: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:
            # Also when the leader ended by itself: its group may live on. The group's number is not given to others
            # while a process of it lives, and the leader is not reaped before the lines above.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not keep_log and not self._kept_before:
                self._log.unlink(missing_ok=True)


def http_ready(url: str) -> bool:
    """Whether a GET of the address is answered with 200."""
    # No proxy: this is always the machine itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException, ValueError):
        return False


def grpc_ready(url: str, model: str = "encode") -> bool:
    """Whether a Triton-like server at host:port says that the model is ready."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return bool(stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=1).ready)
        except grpc.RpcError:
            return False


def log_file(folder: Path | None, name: str) -> Path | None:
    """Where the log of a server goes: into the folder of the run, if there is one, under the server's name."""
    return folder and folder / f"{''.join(letter if letter.isalnum() else '_' for letter in name)}.log"


def has_content(log: Path | None) -> bool:
    """Whether there is a log that says something."""
    return log is not None and log.is_file() and log.stat().st_size > 0


def _temporary_log() -> Path:
    file, name = tempfile.mkstemp(prefix="bench-", suffix=".log")
    os.close(file)
    return Path(name)


def _end_of(log: Path) -> str:
    """The last lines a failed server wrote."""
    with suppress(OSError):
        return f"see {log}, which ends: " + " / ".join(log.read_text(errors="replace").splitlines()[-4:])
    return "no output"
