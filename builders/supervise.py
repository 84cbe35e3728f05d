"""The command `supervise`: look after a tritonserver that somebody else started, in a container for example."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from builders.access import Access
from builders.command_options import CPU, Config, Key, ModelName, chosen_models, say
from builders.errors import ServerError
from builders.health import health_endpoint
from builders.http_api import HttpApi
from builders.serve_options import CanaryDeadline, CanaryEvery, HealthPort, key_for, supervision_of
from builders.supervisor import Supervisor, SupervisorSettings, lanes_of
from builders.triton_log import ServerEvent

_POLL_S = 0.5


def find_server(pid: int | None = None) -> int:
    """The process id of the one tritonserver that this process can see, or `pid` if that is one.

    Raises:
        ServerError: there is none, or more than one.
    """
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_server(entry)]
    if pid is not None:
        if pid in found:
            return pid
        raise ServerError("this process is no tritonserver", value=pid, limit=f"one of {found}", remedy="correct --pid")
    if len(found) != 1:
        raise ServerError(
            "not exactly one tritonserver runs here", value=sorted(found),
            remedy="share its process namespace (the same container, or --pid=container:NAME), or give --pid",
        )  # fmt: skip
    return found[0]


def supervise(
    config: Config = CPU,
    model: ModelName = None,
    address: Annotated[str, typer.Option("--http", help="HTTP address of the running server.")] = "127.0.0.1:8000",
    key: Key = None,
    pid: Annotated[int | None, typer.Option(help="The server's process id; default: the only tritonserver.")] = None,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address of the health port.")] = "127.0.0.1",
    health_port: HealthPort = None,
    canary_every: CanaryEvery = 10.0,
    canary_deadline: CanaryDeadline = 30.0,
) -> None:
    """Look after a tritonserver that runs already, in a container for example; `serve` does it by itself."""
    settings = chosen_models(config, model)
    repository = settings[0].repository
    models = [name for each in settings for name in (each.entry_model, *lanes_of(repository, each.entry_model))]
    name, _, port = address.rpartition(":")
    if not (name and port.isdigit()):
        raise ServerError("this is no address", value=address, limit="host:port", remedy="correct --http")
    secret = key_for(repository, key)
    api = HttpApi(name.strip("[]"), int(port), Access(secret).http_headers)
    look_after(
        find_server(pid), repository, models, api, supervision_of(canary_every, canary_deadline), say,
        host=host, health_port=health_port,
    )  # fmt: skip


def look_after(
    pid: int,
    repository: Path,
    models: Sequence[str],
    api: HttpApi,
    settings: SupervisorSettings,
    tell: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    health_port: int | None = None,
) -> None:
    """Look after the models of a server until it ends, or until Ctrl-C or SIGTERM; call it in the main thread.

    Args:
        pid: the server's process id, in this process's own namespace.
        repository: its model repository; heals need to write there.
        models: what it serves, entries and lanes.
        api: its HTTP API.
        settings: how.
        tell: told what happens, in lines.
        host: where the health endpoint listens.
        health_port: its port; none by default.

    Raises:
        ServerError: the health port cannot be had.
    """
    stop = _Stop()
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def alive() -> int | None:
        return pid if _is_server(Path("/proc") / str(pid)) else None

    def told(event: ServerEvent) -> None:
        tell(f"{event.kind:<8} {event.model}: {event.text}")

    supervisor = Supervisor(repository, models, api, alive, settings, told)
    try:
        if health_port is None:
            _run(supervisor, api, models, alive, stop)
            return
        with health_endpoint(host, health_port, supervisor.status) as url:
            tell(f"health   {url}/readyz")
            _run(supervisor, api, models, alive, stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop:
    """Whether a signal came. No Event: its lock may be this very thread's when the signal comes."""

    requested = False

    def ask(self, *_: object) -> None:
        """The signal's handler."""
        self.requested = True


def _run(
    supervisor: Supervisor, api: HttpApi, models: Sequence[str], alive: Callable[[], int | None], stop: _Stop
) -> None:
    """Wait until every model is loaded, then watch."""
    waiting = list(models)
    while not stop.requested and alive() is not None:
        waiting = [model for model in waiting if not api.is_ready(model)]
        if not waiting:
            break
        time.sleep(_POLL_S)
    if waiting:
        return
    supervisor.start()
    try:
        while not stop.requested and alive() is not None:
            time.sleep(_POLL_S)
    finally:
        supervisor.close()


def _is_server(process: Path) -> bool:
    try:
        name = (process / "comm").read_text("utf-8", "replace").strip()
        state = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return name == "tritonserver" and state not in "ZX" and int(process.name) != os.getpid()
