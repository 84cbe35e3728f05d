"""The command `canary`: a version on trial, with the table that it is judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from builders.command_options import CPU, Config, Key, ModelName, Url, about
from builders.serve_options import TlsCa, TlsClientCert, TlsClientKey, key_for, tls_of
from builders.settings import load_settings

MetricsUrl = Annotated[
    str, typer.Option("--metrics-url", envvar="METRICS_URL", help="Metrics page of the running server.")
]
Share = Annotated[
    float, typer.Option(min=0, max=0.5, help="Share of the requests that it answers; 0 ends a trial and unloads it.")
]
Seconds = Annotated[float, typer.Option(min=1, max=86400, help="How long it is tried.")]
Apply = Annotated[bool, typer.Option("--apply", help="Promote it when it is not worse; else it is dropped either way.")]
Slower = Annotated[float, typer.Option(min=1, help="Its times at most, as a multiple of the control's.")]
Errors = Annotated[
    float, typer.Option(min=0, max=1, help="Share of its requests that may fail or be late, above the control's.")
]
Least = Annotated[int, typer.Option(min=1, help="Answers of each that are needed to say anything.")]
Deadline = Annotated[
    float, typer.Option(min=0.05, max=600, help="Seconds after which the served version answers in its place.")
]
Texts = Annotated[Path | None, typer.Option(help="Your own texts, one a line, that both answer and that are compared.")]


def canary(
    version: Annotated[int, typer.Argument(min=1, help="Number of a published version.")],
    config: Config = CPU,
    model: ModelName = None,
    share: Share = 0.05,
    seconds: Seconds = 60.0,
    apply: Apply = False,
    slower: Slower = 1.25,
    errors: Errors = 0.001,
    least: Least = 100,
    deadline: Deadline = 5.0,
    texts: Texts = None,
    url: Url = "127.0.0.1:8001",
    metrics_url: MetricsUrl = "http://127.0.0.1:8002/metrics",
    key: Key = None,
    tls_ca: TlsCa = None,
    tls_client_cert: TlsClientCert = None,
    tls_client_key: TlsClientKey = None,
) -> None:
    """Let a version answer a share of the real requests, compare it with the served one, then promote or drop it.

    Exit code 1 when it is worse, or when there were too few requests to say.
    """
    from builders.agreement import SAMPLE, read_texts
    from builders.candidate import TrialOptions, drop_candidate, run_trial
    from builders.command_options import tell_change
    from builders.comparison import Limits, comparison_table

    settings, tls = load_settings(config, model), tls_of(tls_ca, tls_client_cert, tls_client_key)
    secret, screen = key_for(settings.repository, key), Console(highlight=False)
    with about(settings) as tell:
        if share == 0:
            dropped = drop_candidate(settings.repository, settings, url, tell, key=secret, tls=tls)
            tell("no version is on trial" if dropped is None else f"version {dropped} was dropped")
            return
        asked = SAMPLE if texts is None else read_texts(texts.read_text(encoding="utf-8"))
        options = TrialOptions(share, seconds, deadline, Limits(slower, errors, least), asked)
        done = run_trial(
            settings.repository, settings, version, url, metrics_url, tell, options, apply=apply, key=secret, tls=tls
        )
        screen.print(comparison_table(done.counts, done.candidate, done.served))
        screen.print(
            f"{done.counts.share:.1%} of {done.counts.requests:.0f} answers came from version {version}. Times in the "
            "entry, from the batch's coming to the answer; in brackets: too few answers to judge by.",
            soft_wrap=True,
        )
        if done.agreement is not None:
            screen.print(str(done.agreement), soft_wrap=True)
        for reason in done.verdict.reasons:
            screen.print(f"[red]{done.verdict.kind}:[/] {escape(reason)}", soft_wrap=True)
        if done.change is not None:
            tell_change(done.change, False, tell)
            return
        tell(f"version {version} was dropped, version {done.served} answers everything")
        if done.verdict.kind != "not worse":
            raise typer.Exit(1)
        tell(f"it was not worse; with --apply it is promoted, or: promote {version}")
