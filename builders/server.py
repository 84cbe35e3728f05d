"""A real tritonserver as a child process: start it, wait until it answers, stop it and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from builders.access import Access
from builders.drain import drain
from builders.errors import ServerError
from builders.http_api import HttpApi
from builders.model_processes import end_group
from builders.ports import Ports
from builders.server_checks import SHARED_MEMORY, check_models, check_shared_memory, has_gpu, large_pages
from builders.server_log import ServerLog
from builders.server_process import ended_how, is_warm, launcher, read_metrics
from builders.serving.entry.backlog import METRICS_URL_VARIABLE
from builders.triton_log import ServerEvent, remedy_for
from builders.triton_wheel import RunFolder, TritonInstall, locate_triton

_POLL_S = 0.1


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
        environment: variables over those of this process; `large_pages` adds one, and ENCODER_LANES_METRICS_URL says
            where this server's metrics are.
        on_event: called from a thread for each event of the log; must not block for long.
        ready_timeout_s: how long entering the `with` block waits until all models are ready, seconds.
        exit_timeout_s: how long `stop` lets requests in flight finish, whole seconds.
        drain_models: the models that clients call and that call the others: `stop` lets them finish first.
        shm_bytes: shared memory of one Python model instance at its start, bytes; it grows by the same.
        access: the key of the control APIs and TLS; by default every API is open and nothing encrypted.
        watch: tell of a dead model process with `on_event`; False where a `Supervisor` looks after them.

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
        drain_models: Sequence[str] = (),
        shm_bytes: int = 4 << 20,
        access: Access | None = None,
        watch: bool = True,
    ) -> None:
        """Check the models and keep the settings; nothing starts yet."""
        check_models(repository, models)
        self.repository, self.models = repository.resolve(), tuple(models)
        self.ports, self.host = ports or Ports(), host
        self.ready_timeout_s, self.exit_timeout_s, self.shm_bytes = ready_timeout_s, exit_timeout_s, shm_bytes
        self.drain_models = tuple(drain_models)
        self._extra_args, self._environment = tuple(extra_args), dict(environment or {})
        # Triton's own beginning, so that people recognise the files; the rest makes them this server's.
        self._shm_prefix = f"triton_python_backend_shm_region_{uuid.uuid4().hex[:12]}_"
        self._gpu = has_gpu()
        self.access = access or Access()
        #: Set when a healed model keeps the server from ending by itself (`Supervisor`): once drained, it is killed.
        self.held_by_healed = False
        self._killed_drained = False
        self._log = ServerLog(log_path, gpu=self._gpu, on_event=on_event, watch=watch)
        self._process: subprocess.Popen[bytes] | None = None
        self._launch_error: OSError | None = None
        # Guards the process id: it may be signalled only while the process is not reaped.
        self._lock = threading.RLock()
        self._reaped = False
        self._exited, self._ended = threading.Event(), threading.Event()
        self._pending: set[str] = set(self.models)
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
        return (
            self.exit_code == 0
            or (self._asked_to_stop and self.exit_code == -signal.SIGTERM)
            or (self._killed_drained and self.exit_code == -signal.SIGKILL)
        )

    @property
    def http_url(self) -> str:
        """KServe v2 over HTTP, with its scheme."""
        return f"http://{self._http_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """KServe v2 over gRPC, host and port."""
        return f"{self._client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """The Prometheus metrics."""
        return f"http://{self._client_host}:{self.ports.metrics}/metrics"

    @property
    def http(self) -> HttpApi:
        """The server's HTTP API, with the key of the restricted ones."""
        return HttpApi(self._http_host.strip("[]"), self.ports.http, self.access.http_headers)

    @property
    def log_path(self) -> Path | None:
        """The server's log; None before the start without an own path."""
        return self._log.path

    @property
    def _client_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104

    @property
    def _http_host(self) -> str:
        # HTTP has no TLS in Triton: where gRPC has, HTTP is for this machine alone.
        return "127.0.0.1" if self.access.tls else self._client_host

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
            base = {**os.environ, **self._environment}
            base |= large_pages(self.repository, self.models, base)
            base.setdefault(METRICS_URL_VARIABLE, self.metrics_url)
            environment = install.environment(run, base)
            log = self._log.open()
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
        """Ask once, over HTTP, for every model that was not ready yet, then for the metrics (the last to start).

        Triton calls an entry ready before its processes can have made their first calls; the metrics tell of those.
        """
        for model in sorted(self._pending):
            if not self.http.is_ready(model):
                return False
            self._pending.discard(model)
        # The process is asked too: whoever else took the port meanwhile would answer as well.
        metrics = read_metrics(self._client_host.strip("[]"), self.ports.metrics)
        self._was_ready = metrics is not None and self.is_running
        return self._was_ready and metrics is not None and is_warm(metrics)

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
        drained = False
        if self.drain_models and self._was_ready and self.is_running:
            drained = drain(self.http, self.drain_models, self.exit_timeout_s, self._exited)
        self._signal(signal.SIGTERM)
        # Triton looks once a second, and unloads after the requests: some seconds over its own timeout. What a healed
        # model left behind it would wait for in vain; all that was accepted is answered by then.
        given_up = drained and self.held_by_healed
        if not self._ended.wait(5 if given_up else self.exit_timeout_s + 10):
            self._killed_drained = given_up
            self.kill()
        if self.stopped_cleanly:
            self._log.remove_temporary()

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
            "http-address": self._http_host if self.access.tls else self.host,
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
            *launcher(),
            str(install.binary),
            "--disable-auto-complete-config",
            *(f"--{name}={value}" for name, value in options.items()),
            *(f"--load-model={model}" for model in self.models),
            *(f"--backend-config=python,{name}={value}" for name, value in python.items()),
            *self.access.arguments(),
            *self._extra_args,
        ]

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
        follower = threading.Thread(
            target=self._log.follow,
            args=(process.pid, self._started_at, self._exited),
            name="tritonserver-log",
            daemon=True,
        )
        follower.start()
        # Ended but not reaped, the process keeps its id, so that the group's number cannot be anyone else's yet.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        end_group(process.pid)
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

    def _failure(self) -> ServerError:
        # What failed long before the end of a server that was ready did not end it.
        since = self._exited_at - 60 if self._was_ready else 0.0
        reason = self._log.reason(since=since)
        hint, see = remedy_for(reason), f"the whole log: {self.log_path}"
        return ServerError(
            f"tritonserver ended ({ended_how(self.exit_code)}): {reason}", remedy=f"{hint} ({see})" if hint else see
        )
