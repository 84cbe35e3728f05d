"""Options of `serve` beyond its ports: who may use the server, and how its models are looked after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from builders.access import Access, ClientTls, made_up_key, read_key
from builders.command_options import control_key, say
from builders.json_log import LogFormat

if TYPE_CHECKING:
    from builders.supervisor import SupervisorSettings
    from builders.tracing import Traces

ServerKey = Annotated[
    str | None,
    typer.Option(
        "--control-key", envvar="CONTROL_KEY", metavar="NAME=VALUE",
        help="Header that the APIs for models, shared memory, trace and logging ask for; default: a random one, kept "
        "in the repository's .control-key while the server runs.",
    ),
]  # fmt: skip
HealthPort = Annotated[
    int | None,
    typer.Option(envvar="HEALTH_PORT", help="Port of /healthz, /readyz and the supervisor's /metrics; default: none."),
]
CanaryEvery = Annotated[
    float, typer.Option(min=0, help="Seconds between two requests that ask whether a model still answers; 0: never.")
]
CanaryDeadline = Annotated[
    float, typer.Option(min=0.1, help="Seconds without any answer after which a model's process is replaced.")
]
Events = Annotated[Path | None, typer.Option(help="File for what happens, one JSON object a line.")]
ServeLogFormat = Annotated[
    LogFormat, typer.Option("--log-format", envvar="LOG_FORMAT", help="What is printed: text, or a JSON object a line.")
]
TracesUrl = Annotated[
    str | None,
    typer.Option(envvar="TRACES_URL", help="OTLP receiver over HTTP, with its path, that traces go to; default: none."),
]
TraceRate = Annotated[
    int,
    typer.Option(
        envvar="TRACE_RATE", min=0, help="Of so many requests one is traced; 0: those that bring a traceparent header."
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", envvar="TLS_CERT", help="PEM certificate: gRPC speaks TLS.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="TLS_KEY", help="PEM private key of --tls-cert.")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", envvar="TLS_CLIENT_CA", help="PEM authority of the clients that are let in."),
]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", envvar="TLS_CA", help="PEM authority of the server's certificate.")
]
TlsClientCert = Annotated[
    Path | None, typer.Option("--tls-client-cert", envvar="TLS_CLIENT_CERT", help="PEM certificate of this client.")
]
TlsClientKey = Annotated[
    Path | None, typer.Option("--tls-client-key", envvar="TLS_CLIENT_KEY", help="PEM key of --tls-client-cert.")
]


@contextmanager
def access_of(
    repository: Path, key: str | None, certificate: Path | None, private_key: Path | None, client_ca: Path | None
) -> Iterator[Access]:
    """The doors of a server that is about to start; without a key a random one, which promote and rollback find.

    Raises:
        BuilderError: an option is wrong, or the key cannot be written down.
    """
    if os.geteuid() == 0:
        say("serve runs as root: whoever gets into a model's process owns this machine; to do: run it as another user")
    given = control_key(key)
    if given is not None:
        yield Access(given, certificate, private_key, client_ca)
        return
    with made_up_key(repository) as made:
        yield Access(made, certificate, private_key, client_ca)


def key_for(repository: Path, key: str | None) -> tuple[str, str] | None:
    """The key of a running server: the given one, else the one that a `serve` on this machine made up."""
    return control_key(key) or read_key(repository)


def tls_of(ca: Path | None, certificate: Path | None, private_key: Path | None) -> ClientTls | None:
    """How promote and rollback speak to a server with TLS; None without --tls-ca."""
    return None if ca is None else ClientTls(ca, certificate, private_key)


def supervision_of(every_s: float, deadline_s: float) -> SupervisorSettings:
    """The supervisor's settings."""
    from builders.canary import CanarySettings
    from builders.supervisor import SupervisorSettings

    return SupervisorSettings(canary=CanarySettings(every_s, deadline_s))


def traces_of(url: str | None, rate: int) -> Traces | None:
    """Where traces go; None without --traces-url.

    Raises:
        ServerError: the address cannot be used.
    """
    from builders.tracing import Traces

    return Traces(url, rate) if url else None
