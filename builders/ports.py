"""The three ports of a server: HTTP, gRPC and metrics."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields

from builders.errors import ServerError

#: Below Linux's own range (net.ipv4.ip_local_port_range begins at 32768) and above the well-known servers.
_UNASSIGNED = range(10240, 32768)
_TRIES = 50


@dataclass(frozen=True)
class Ports:
    """Where a server listens; Triton's own defaults.

    Attributes:
        http: KServe v2 over HTTP.
        grpc: KServe v2 over gRPC.
        metrics: Prometheus metrics, over HTTP.

    Raises:
        ServerError: a port is outside 1…65535, or two are the same.
    """

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def __post_init__(self) -> None:
        """Check the range of each port and that they differ."""
        seen: dict[int, str] = {}
        for name, port in self._named():
            if not 1 <= port <= 65535:
                raise ServerError(f"the {name} port is no port", value=port, limit="1…65535", remedy=_remedy(name))
            if port in seen:
                raise ServerError(f"the {seen[port]} and {name} ports are the same", value=port, remedy=_remedy(name))
            seen[port] = name

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Ports:
        """The ports that HTTP_PORT, GRPC_PORT and METRICS_PORT name; 8000, 8001, 8002 where they are unset or empty.

        Raises:
            ServerError: a value is no port, or two are the same.
        """
        values = os.environ if environment is None else environment
        chosen: dict[str, int] = {}
        for field in fields(cls):
            text = values.get(_variable(field.name), "").strip()
            if not text:
                continue
            if not (text.isascii() and text.isdigit()):
                raise ServerError(
                    f"{_variable(field.name)} is no port", value=text, limit="1…65535", remedy=_remedy(field.name)
                )
            chosen[field.name] = int(text)
        return cls(**chosen)

    def check_free(self, host: str) -> None:
        """Make sure that a server can listen on `host` at each of the ports.

        tritonserver binds after it has loaded every model: without this check, a taken port shows after minutes.

        Raises:
            ServerError: a port is taken or not allowed, or `host` is no address of this machine.
        """
        for name, port in self._named():
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                with socket.socket(family, kind, protocol) as probe:
                    # As the server does: a connection that is only just closed must not count as taken.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            except OSError as error:
                raise _refusal(name, host, port, error) from error

    def _named(self) -> list[tuple[str, int]]:
        return [("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)]


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Three different ports that are free now, for tests; each is held open until all are chosen.

    They are none of those that Linux gives to connections and to whoever asks for any port: the server listens only
    when it has loaded every model, and until then one of these would be taken now and then. Another process may still
    ask for one by number: then `check_free` or the server says so.

    Raises:
        ServerError: `host` is no address of this machine, or next to no port is free.
    """
    with ExitStack() as held:
        return Ports(*(_free_port(host, held) for _ in range(3)))


def _free_port(host: str, held: ExitStack) -> int:
    reason = ""
    for _ in range(_TRIES):
        port = _UNASSIGNED.start + secrets.randbelow(len(_UNASSIGNED))
        holder = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            holder.bind((host, port))
        except OSError as error:
            reason = str(error.strerror or error)
        else:
            return port
    raise ServerError(
        f"no free port was found ({reason})",
        value=host,
        limit=f"{_TRIES} tries from {_UNASSIGNED.start} to {_UNASSIGNED.stop - 1}",
        remedy="correct the host, or choose the ports yourself",
    )


def _variable(name: str) -> str:
    return f"{name.upper()}_PORT"


def _remedy(name: str) -> str:
    return f"set --{name}-port or {_variable(name)}"


def _refusal(name: str, host: str, port: int, error: OSError) -> ServerError:
    if error.errno == errno.EADDRINUSE:
        return ServerError(
            f"the {name} port of {host} is taken",
            value=port,
            remedy=f"{_remedy(name)} to another port, or stop what listens there (ss -ltnp 'sport = :{port}')",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ServerError(
            f"the {name} port of {host} is not allowed for this user", value=port, remedy=f"{_remedy(name)} above 1023"
        )
    return ServerError(
        f"cannot listen on the host ({error.strerror or error})",
        value=host,
        limit="an address of this machine, such as 127.0.0.1 or 0.0.0.0",
        remedy="set --host",
    )
