"""`status`: the server at a glance."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from clients.client import EncoderClient
from clients.commands.common import (
    DEFAULT_URL,
    ClientCertificate,
    ClientKey,
    Header,
    RootCertificate,
    Server,
    Token,
    Url,
    errors_to_exit_codes,
)
from clients.errors import InvalidInput, ServerUnavailable
from clients.screen import print_whole, width_of
from clients.status import ModelStatus, ServerStatus, fetch_metrics

_METRICS_PORT = 8002
_COLUMNS = (
    *("model", "version", "state", "requests", "failed", "rejected", "pending"),
    *("batch", "queue ms", "compute ms", "P50 ms", "P99 ms"),
)
#: What a narrow terminal goes without, the first that it can do without first.
_SPARED = ("compute ms", "batch", "failed")
_SHORTEST_S, _LONGEST_S = 0.2, 3600.0
#: How gRPC may be told to find a server, before its address.
_RESOLVER = re.compile(r"^(?:dns|passthrough|xds):(?://[^/]*/)?|^ipv[46]:")


def status(
    url: Url = DEFAULT_URL,
    metrics: Annotated[
        str | None,
        typer.Option(help="Address of Triton's metrics; left out: port 8002 of the same host; '' for none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    watch: Annotated[float | None, typer.Option(help="Ask again every so many seconds, until Ctrl-C.")] = None,
    deadline: Annotated[float, typer.Option(help="Longest wait for each of the server's answers, seconds.")] = 5.0,
    token: Token = None,
    header: Header = None,
    root_certificate: RootCertificate = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Models, versions, queues, P50 and P99, batch sizes and rejected requests of a server.

    Counts are since a model was loaded; P50 and P99 are Triton's own summaries of the last minute, over a whole request
    inside the server.
    """
    server = Server(
        url,
        token=token,
        header=header,
        root_certificate=root_certificate,
        client_certificate=client_certificate,
        client_key=client_key,
    )
    with errors_to_exit_codes(), server.connect() as client:
        if watch is not None and not _SHORTEST_S <= watch <= _LONGEST_S:
            raise InvalidInput("--watch is out of its limits", value=watch, limit=f"{_SHORTEST_S} to {_LONGEST_S} s")
        if watch is None:
            _show(_asked(client, metrics, deadline), as_json)
            return
        try:
            _watch(client, metrics, deadline, as_json, watch)
        except KeyboardInterrupt:
            return


def _watch(client: EncoderClient, metrics: str | None, deadline: float, as_json: bool, pause: float) -> None:
    if as_json:
        while True:
            _show(_asked(client, metrics, deadline), as_json)
            time.sleep(pause)
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            live.update(status_table(_asked(client, metrics, deadline), live.console.width), refresh=True)
            time.sleep(pause)


def _asked(client: EncoderClient, metrics: str | None, deadline: float) -> ServerStatus:
    """The status, with the metrics if they can be had; an address that was given must answer."""
    page = None
    if metrics is None:
        try:
            page = fetch_metrics(f"http://{host_of(client.url)}:{_METRICS_PORT}/metrics")
        except (InvalidInput, ServerUnavailable):
            page = None
    elif metrics:
        page = fetch_metrics(metrics)
    return client.status(deadline=deadline, metrics=page)


def host_of(url: str) -> str:
    """The host of a client's url, in brackets if it is an IPv6 address; this machine for a unix socket."""
    if url.startswith("unix:"):
        return "127.0.0.1"
    url = _RESOLVER.sub("", url).partition(",")[0]  # of several addresses the first
    host = urlsplit(url if "://" in url else f"//{url}").hostname or "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _show(given: ServerStatus, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(given.as_json()) + "\n")
        sys.stdout.flush()
        return
    console = Console()
    print_whole(console, status_table(given, console.width if console.is_terminal else None))


def status_table(given: ServerStatus, width: int | None = None) -> Table:
    """The table of a status.

    Args:
        given: the status.
        width: of the terminal, characters: one that is too narrow for all columns goes without a few of them; None for
            any.
    """
    spared: tuple[str, ...] = ()
    while width is not None and width_of(_table(given, spared)) > width and spared != _SPARED:
        spared = _SPARED[: len(spared) + 1]
    return _table(given, spared)


def _table(given: ServerStatus, spared: tuple[str, ...]) -> Table:
    caption = None if given.metrics else "no metrics: pending, rejected, P50 and P99 are not known (--metrics)"
    title = f"{escape(given.url)}, Triton {escape(given.version)}"
    table = Table(title=title, caption=caption, title_justify="left", box=None, padding=(0, 1, 0, 0))
    shown = [name for name in _COLUMNS if name not in spared]
    for place, name in enumerate(shown):
        words = name.replace(" ", "\n")  # narrower
        table.add_column(words, justify="left" if name in ("model", "state") else "right", no_wrap=bool(place))
    for model in given.models:
        cells = dict(zip(_COLUMNS, _row(model), strict=True))
        table.add_row(*(cells[name] for name in shown))
    return table


def _row(model: ModelStatus) -> list[str]:
    state = model.state or "loaded"
    reason = f" ({re.sub(r'[^ -~]', ' ', model.reason)[:40]})" if model.reason else ""
    colour = {"READY": "green", "loaded": "green", "UNAVAILABLE": "dim"}.get(state, "yellow")
    counts = (model.requests, model.failed, model.rejected, model.pending)
    times = (model.mean_batch, model.queue_ms, model.compute_ms, model.p50_ms, model.p99_ms)
    return [
        model.name,
        model.version,
        f"[{colour}]{state}[/]{escape(reason)}",
        *("" if count is None else f"{count:,}" for count in counts),
        *("" if value is None else f"{value:.1f}" for value in times),
    ]
