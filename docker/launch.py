"""The container's first process: starts tritonserver, watches it, and stops it without a lost request.

    python3 launch.py --model-repository=/models --http-port=8000 --exit-timeout-secs=30 ...

All arguments go to tritonserver. Added are `--load-model` for every model that has a published version, and the flags
that close the APIs through which a client could change the server. Its own settings are variables:

* CONTROL_KEY_FILE: a file with one line NAME=VALUE, the key of those APIs (`make promote` wants the same line in
  CONTROL_KEY). Without it a random key is made, so that nobody can use them. Triton takes the key as an argument alone,
  so whoever may see this container's processes may see it.
* ON_DEAD_PROCESS: `stop` (default) ends the container with exit code 1 when a model process died or a model hangs, so
  that the engine starts it anew; `report` only says so.
* HEALTH_PORT: where /healthz, /readyz and /metrics of this script answer (endpoint.py), 8003 by default; 0 for none.
* CANARY_EVERY: seconds between two small requests to each model, 10 by default; 0 for none: a model that hangs is then
  not seen.
* LOG_FORMAT: `text` (default) or `json`, one object a line, tritonserver's lines too (logs.py).
* TRACES_URL, TRACE_RATE: where traces go, and how many requests are traced (tracing.py).

SIGTERM unloads the entries first, so that everything they have accepted is answered while the lanes still work; then
tritonserver gets the signal. Given the signal at once, Triton refuses the calls from the entry to the lanes while
requests are still being computed. A second signal kills.

Standard library alone: the server's image has no package of this project.
"""

from __future__ import annotations

import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

from endpoint import endpoint
from logs import is_json, relay, say
from processes import stubs_of
from repository import LaunchError, read_models
from tracing import trace_flags, trace_variables
from triton_http import Triton
from watch import Watch, WatchSettings

_TICK_S = 0.1
#: What a drained server with an ill model gets to end by itself, seconds.
_ILL_S = 3.0
#: APIs through which a client could load code, read memory, write files.
_CLOSED = "model-repository,shared-memory,trace,logging"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where shm_open puts its files, not a temporary folder)
#: Tells the entry's processes where their server's metrics are (entry/backlog.py).
METRICS_URL_VARIABLE = "ENCODER_LANES_METRICS_URL"
#: Stack of the server's threads, bytes. Triton 2.51 reads JSON recursively, so that 100 kB of brackets end it with the
#: usual 8 MB. What is not used of it takes no memory.
_STACK = 512 << 20
#: Triton's own default where the flag is not given, bytes.
_DEFAULT_REGION = 1 << 20


class Launcher:
    """One server, from its start to its end.

    Args:
        arguments: tritonserver's, as given.
        key: name and value of the control key.
        stop_on_dead_process: end when a model process died or a model hangs.
        health_port: where to tell what is known of the models; 0 for nowhere.
        canary_s: seconds between two small requests to each model; 0 for none.

    Raises:
        LaunchError: nothing is published, or /dev/shm is too small.
    """

    def __init__(
        self,
        arguments: list[str],
        key: tuple[str, str],
        *,
        stop_on_dead_process: bool,
        health_port: int = 0,
        canary_s: float = 10.0,
    ) -> None:
        """Read the repository and check the machine; nothing starts yet."""
        self.repository = Path(_value(arguments, "model-repository") or "/models")
        self.models = read_models(self.repository)
        self.exit_timeout_s = int(_value(arguments, "exit-timeout-secs") or 30)
        self._check_shared_memory(arguments)
        self.metrics_url = f"http://127.0.0.1:{_value(arguments, 'metrics-port') or 8002}/metrics"
        http_port = int(_value(arguments, "http-port") or 8000)
        self._triton = Triton(http_port, key=key)
        self._watch = Watch(lambda: read_models(self.repository), http_port, WatchSettings(canary_s=canary_s))
        self._health_port = health_port
        self._stop_on_dead_process = stop_on_dead_process
        self._signals = 0
        self._status: int | None = None
        name, value = key
        self.command = [
            "tritonserver",
            *arguments,
            *trace_flags(os.environ),
            *(f"--load-model={model.name}" for model in self.models),
            f"--http-restricted-api={_CLOSED}:{name}={value}",
            f"--grpc-restricted-protocol={_CLOSED}:{name}={value}",
        ]

    def run(self) -> int:
        """Start the server and stay until it has ended.

        Returns:
            The container's exit code: 0 after a clean stop, 1 if a model process died or hung, else the server's own.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        as_json = is_json()
        raise_stack_limit()
        with ExitStack() as stack:
            if self._health_port:
                stack.enter_context(endpoint(self._health_port, time.time(), self._watch.states))
            process = subprocess.Popen(
                self.command,
                # A group of its own: a terminal's Ctrl-C must reach this process alone.
                process_group=0,
                env={METRICS_URL_VARIABLE: self.metrics_url, **os.environ, **trace_variables(os.environ)},
                stdout=subprocess.PIPE if as_json else None,
                stderr=subprocess.STDOUT if as_json else None,
                umask=0o077,  # Triton's regions in /dev/shm are 0644 all the same (SECURITY.md)
            )
            relayed = relay(process.stdout) if process.stdout else None
            say(f"tritonserver {process.pid}: {', '.join(model.name for model in self.models)}")
            self._watch.start(process.pid)
            self._stay(process)
            self._watch.close()
            ill = bool(self._watch.fatal())
            if not self._ended(process):
                self._stop(process, ill=ill)
            code = self._exit_code()
            if relayed:
                # Not longer: a process that outlives the server may hold the pipe open.
                relayed.join(2.0)
            say(f"tritonserver ended with {code}")
            return 1 if ill else code

    def _stay(self, process: subprocess.Popen[bytes]) -> None:
        """Until the server ends, a signal comes, or (if asked to) a model is in a state that only a new start heals."""
        told: dict[str, str] = {}
        while not self._ended(process) and not self._signals:
            fatal = self._watch.fatal()
            for name, what in fatal.items():
                if told.get(name) != what:
                    say(f"only a new start heals this: {what}")
            told = fatal
            if fatal and self._stop_on_dead_process:
                return
            time.sleep(_TICK_S)

    def _end_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the processes of models that hang, so that what they hold gets its error instead of never an answer."""
        for name, state in self._watch.states().items():
            for stub in stubs_of(process.pid, name) if state.fatal and not state.loss else ():
                say(f"{name} hangs: its process {stub} is killed")
                with suppress(ProcessLookupError):
                    os.kill(stub, signal.SIGKILL)

    def _stop(self, process: subprocess.Popen[bytes], *, ill: bool) -> None:
        asked = self._signals
        say(f"stopping: accepted requests are answered, for at most {self.exit_timeout_s} s; a second signal kills")
        self._end_hung(process)
        if drained := self._drain(process, asked):
            say("every accepted request is answered")
        if not self._ended(process):
            os.kill(process.pid, signal.SIGTERM)
        # Triton looks once a second, and unloads the lanes after that: some seconds over its own timeout. A model whose
        # process died with a request it would wait for in vain; all that was accepted is answered by then.
        deadline = time.monotonic() + (_ILL_S if drained and ill else self.exit_timeout_s + 10)
        while not self._ended(process):
            if self._signals > max(1, asked) or time.monotonic() > deadline:
                say("killing tritonserver")
                os.kill(process.pid, signal.SIGKILL)
                deadline = float("inf")
                self._signals = 0
            time.sleep(_TICK_S)

    def _drain(self, process: subprocess.Popen[bytes], asked: int) -> bool:
        """Unload the entries and wait until they are gone; False where the server cannot say so or time is up."""
        entries = self._watch.entries()
        for name in sorted(entries):
            if not self._triton.post(f"/v2/repository/models/{name}/unload").ok:
                return False
        deadline = time.monotonic() + self.exit_timeout_s
        while time.monotonic() < deadline and self._signals <= max(1, asked) and not self._ended(process):
            index = self._triton.post("/v2/repository/index").json()
            if not isinstance(index, list):
                return False
            busy = {
                model["name"] for model in index if model.get("state") in ("READY", "UNLOADING") and "name" in model
            }
            if not busy & entries:
                return True
            time.sleep(_TICK_S)
        return False

    def _ended(self, process: subprocess.Popen[bytes]) -> bool:
        """Reap whatever ended; as the first process of a container this one inherits every orphan."""
        while self._status is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == process.pid:
                self._status = status
                process.returncode = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def _exit_code(self) -> int:
        code = os.waitstatus_to_exitcode(self._status or 0)
        if code == -signal.SIGTERM and self._signals:
            return 0  # Before its endpoints run, tritonserver does not catch the signal; nothing was in flight.
        return code if code >= 0 else 128 - code

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _check_shared_memory(self, arguments: list[str]) -> None:
        given = [value for value in _values(arguments, "backend-config") if "shm-default-byte-size=" in value]
        region = int(given[-1].rpartition("=")[2]) if given else _DEFAULT_REGION
        processes = sum(model.processes for model in self.models)
        free, needed = shutil.disk_usage(_SHARED_MEMORY).free, processes * region
        if free < needed:
            raise LaunchError(
                f"{_SHARED_MEMORY} has {free >> 20} MiB free, and {processes} model processes begin with"
                f" {needed >> 20} MiB: a process would die of SIGBUS under load. Raise shm_size (compose) or the"
                " sizeLimit of the volume (Kubernetes), or lower entry.processes"
            )


def raise_stack_limit() -> None:
    """Give what is started after this the stack that Triton needs, as far as the container lets it.

    Without a limit glibc gives a thread 2 MB, so that one is set then, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = _STACK if hard == resource.RLIM_INFINITY else min(hard, _STACK)
    if soft == resource.RLIM_INFINITY or soft < most:
        resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


def read_key(path: str | None) -> tuple[str, str]:
    """Name and value of the control key; made up where no file is named.

    Raises:
        LaunchError: the file cannot be read or does not hold NAME=VALUE.
    """
    if not path:
        return "control-key", secrets.token_hex(32)
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise LaunchError(f"the control key cannot be read: {error}: correct CONTROL_KEY_FILE") from None
    name, _, value = text.partition("=")
    # Not the text itself: it is the secret.
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not re.fullmatch(r"[!-+\--~]{16,}", value):
        raise LaunchError(
            f"{path} must hold one line NAME=VALUE: letters, digits and hyphens, then at least 16 characters without"
            " blanks and commas: printf 'control-key=%s' \"$(openssl rand -hex 32)\""
        )
    return name, value


def read_number(name: str, default: int, most: int) -> float:
    """A number from a variable.

    Args:
        name: of the variable; empty counts as not set.
        default: where it is not set.
        most: the largest allowed; the smallest is 0.

    Raises:
        LaunchError: it is no number, or out of range.
    """
    text = os.environ.get(name, "") or str(default)
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) > most:
        raise LaunchError(f"{name} is {text!r}: give a number from 0 to {most}")
    return float(text)


def _values(arguments: list[str], name: str) -> list[str]:
    """What a flag of tritonserver is given, behind `=` or as the next argument; of several the last counts."""
    found = []
    for argument, after in pairwise([*arguments, ""]):
        flag, joined, value = argument.partition("=")
        if flag == f"--{name}":
            found.append(value if joined else after)
    return found


def _value(arguments: list[str], name: str) -> str | None:
    found = _values(arguments, name)
    return found[-1] if found else None


def main() -> int:
    """Run until the server has ended."""
    mode = os.environ.get("ON_DEAD_PROCESS", "stop")
    try:
        if mode not in ("stop", "report"):
            raise LaunchError(f"ON_DEAD_PROCESS is {mode!r}: give stop or report")
        is_json()
        launcher = Launcher(
            sys.argv[1:],
            read_key(os.environ.get("CONTROL_KEY_FILE")),
            stop_on_dead_process=mode == "stop",
            health_port=int(read_number("HEALTH_PORT", 8003, 65535)),
            canary_s=read_number("CANARY_EVERY", 10, 3600),
        )
        return launcher.run()
    except (LaunchError, OSError, ValueError) as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
