"""The command `serve`: start a server, say what happens in a form for people, and stop it cleanly."""

from __future__ import annotations

import json
import queue
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from builders.access import Access
from builders.errors import ServerError
from builders.health import health_endpoint
from builders.json_log import Level, event_line, json_line
from builders.names import is_entry
from builders.ports import Ports
from builders.server import TritonServer
from builders.server_checks import entry_facts
from builders.supervisor import Supervisor, SupervisorSettings
from builders.tracing import Traces
from builders.triton_log import ServerEvent

_TICK_S = 0.1
_STYLES = {"failed": "bold red", "error": "red", "warning": "yellow", "loaded": "green", "healed": "green"}


def serve(
    repository: Path,
    models: Sequence[str],
    ports: Ports,
    host: str,
    *,
    log_path: Path | None = None,
    drain_models: Sequence[str] = (),
    console: Console | None = None,
    on_ready: Callable[[], None] | None = None,
    access: Access | None = None,
    supervision: SupervisorSettings | None = None,
    health_port: int | None = None,
    events_path: Path | None = None,
    as_json: bool = False,
    traces: Traces | None = None,
) -> int:
    """Serve `models` of `repository` until Ctrl-C or SIGTERM; must be called in the main thread.

    Prints the start-up model by model, the addresses and a sample request, then the server's warnings and errors.
    The first signal lets requests in flight finish, a second one kills.

    Args:
        repository: the model repository.
        models: what to load; the others of the repository stay unloaded.
        ports: where to listen.
        host: the address to listen on.
        log_path: where the server's whole log goes; a temporary file by default.
        drain_models: see `TritonServer`.
        console: where to print; standard output by default.
        on_ready: called once, when every model answers.
        access: the key of the control APIs and TLS; by default every API is open.
        supervision: how dead and hung model processes are looked for and replaced.
        health_port: where `/healthz`, `/readyz` and `/metrics` of the supervisor answer; none by default.
        events_path: a file that every event is appended to, as lines of JSON.
        as_json: print one JSON object a line (`builders.json_log`) instead of text for people.
        traces: where traces go; none are made by default.

    Returns:
        The command's exit code: 0 after a clean stop, 1 if the server ended by itself or had to be killed.

    Raises:
        ServerError: the server cannot be started at all (a taken port, no wheel, an unknown model).
    """
    screen = _Screen(console or Console(highlight=False), events_path, as_json=as_json)
    events: queue.SimpleQueue[ServerEvent] = queue.SimpleQueue()
    server = TritonServer(
        repository,
        models,
        ports=ports,
        host=host,
        log_path=log_path,
        drain_models=drain_models,
        extra_args=traces.flags() if traces else (),
        environment=traces.variables() if traces else None,
        on_event=events.put,
        access=access,
        watch=False,
    )

    def held() -> None:
        server.held_by_healed = True

    supervisor = Supervisor(
        server.repository,
        models,
        server.http,
        lambda: server.pid if server.is_running else None,
        supervision,
        events.put,
        held,
    )
    with ExitStack() as stack:
        stop = stack.enter_context(_stop_signals(server))
        if health_port is not None:
            screen.health_url = stack.enter_context(health_endpoint(host, health_port, supervisor.status))
        try:
            server.start()
            screen.started(server)
            ready = False
            while not stop.requested:
                for event in _waiting(events):
                    screen.event(event, starting=not ready)
                server.raise_if_ended()
                if not ready and server.is_ready():
                    ready = True
                    supervisor.start()
                    for event in _waiting(events):
                        screen.event(event, starting=True)
                    screen.ready(server)
                    if on_ready:
                        on_ready()
                time.sleep(_TICK_S)
            screen.stopping(server)
        except ServerError as error:
            if server.pid is None:
                raise
            for event in _waiting(events):
                screen.event(event, starting=False)
            screen.failed(error)
            return 1
        finally:
            supervisor.close()
            server.stop()
        for event in _waiting(events):
            screen.event(event, starting=False)
    return screen.stopped(server)


@dataclass
class _Stop:
    """Whether a signal asked to stop.

    A plain attribute: the handler runs inside whatever the main thread is doing, where taking a lock (of an Event, of
    the console) that this thread holds would never end.
    """

    requested: bool = False


@contextmanager
def _stop_signals(server: TritonServer) -> Iterator[_Stop]:
    """SIGINT and SIGTERM ask to stop; the second of them kills the server. The old handlers come back."""
    stop = _Stop()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.requested:
            server.kill(wait=False)
        stop.requested = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _waiting(events: queue.SimpleQueue[ServerEvent]) -> Iterator[ServerEvent]:
    while True:
        try:
            yield events.get_nowait()
        except queue.Empty:
            return


class _Screen:
    """What `serve` prints."""

    def __init__(self, console: Console, events_path: Path | None = None, *, as_json: bool = False) -> None:
        self._console = console
        self._as_json = as_json
        self._events_path = events_path
        self.health_url = ""
        self._loading_since: dict[str, float] = {}
        self._started = time.monotonic()

    def started(self, server: TritonServer) -> None:
        count = len(server.models)
        self._started = time.monotonic()
        self._say(f"tritonserver {server.pid}: {count} model{'s' * (count != 1)} of {server.repository}", "bold")
        self._say(f"  log      {server.log_path}", "dim")

    def event(self, event: ServerEvent, *, starting: bool) -> None:
        style = _STYLES.get(event.kind, "")
        self._write(event)
        if self._as_json:
            self._print(event_line(event))
            return
        match event.kind:
            case "loading" if event.model is not None:
                self._loading_since[event.model] = event.seconds
                self._say(f"  loading  {event.model}, version {event.version}", "dim")
            case "warm-up":
                self._say(f"  warm-up  {event.model}", "dim")
            case "loaded" if event.model is not None:
                took = event.seconds - self._loading_since.pop(event.model, event.seconds)
                self._say(f"  loaded   {event.model}  {took:.1f} s, warm-up included", style)
            case "unloaded":
                self._say(f"  unloaded {event.model}, version {event.version}", "dim")
            case "failed":
                # While starting, the server ends over it, and the reason is told once, there.
                if not starting:
                    self._say(f"  failed   {event.model}: {event.text}", style)
            case "warning" | "error" | "healed":
                about = f"{event.model}: " if event.model else ""
                self._say(f"  {event.kind:<8} {about}{event.text}", style)
            case _:
                pass  # Endpoints are told with `ready`, the stop by `stopping`.

    def ready(self, server: TritonServer) -> None:
        self._say(f"  ready    after {time.monotonic() - self._started:.1f} s", "bold green")
        self._say(f"  HTTP     {server.http_url}\n  gRPC     {server.grpc_url}\n  metrics  {server.metrics_url}")
        if self.health_url:
            self._say(f"  health   {self.health_url}/readyz")
        for model in [model for model in server.models if is_entry(model)] or server.models[:1]:
            paired = entry_facts(server.repository, model).get("pair") == "required"
            self._say(f"  try      {sample_request(server.http_url, model, paired=paired)}")
        self._say("  Ctrl-C stops")

    def stopping(self, server: TritonServer) -> None:
        self._say(
            f"stopping: in-flight requests are answered (at most {server.exit_timeout_s} s); Ctrl-C again kills", "bold"
        )

    def failed(self, error: ServerError) -> None:
        self._say(str(error), "bold red", level="error")

    def stopped(self, server: TritonServer) -> int:
        if server.stopped_cleanly:
            self._say("stopped", "bold")
            return 0
        text = f"killed: tritonserver ended with {server.exit_code}; its log: {server.log_path}"
        self._say(text, "bold red", level="error")
        return 1

    def _write(self, event: ServerEvent) -> None:
        if self._events_path is not None:
            line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **asdict(event)}
            with self._events_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _say(self, text: str, style: str = "", level: Level = "info") -> None:
        if self._as_json:
            for line in text.splitlines():
                self._print(json_line(level, line.strip()))
            return
        self._print(text, style)

    def _print(self, text: str, style: str = "") -> None:
        # Text, not markup: a message of Triton may hold square brackets. Unwrapped: a request is there to be copied.
        self._console.print(Text(text, style=style), soft_wrap=True)


def sample_request(http_url: str, model: str, *, paired: bool = False) -> str:
    """A command line to try a server with: a request to an entry, of any other model its configuration.

    Args:
        http_url: the server's HTTP address.
        model: the Triton model.
        paired: the entry takes nothing but pairs of texts.
    """
    if not is_entry(model):
        return f"curl -s {http_url}/v2/models/{model}/config"
    texts = {"TEXT": "Where is my order?", "TEXT_PAIR": "It leaves our house today."}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
        for name, text in texts.items()
        if paired or name == "TEXT"
    ]
    return f"curl -s {http_url}/v2/models/{model}/infer -d {shlex.quote(json.dumps({'inputs': inputs}))}"
