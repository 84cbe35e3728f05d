"""`encode`: texts in, JSON lines or a .npy file out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from clients.commands.common import (
    DEFAULT_RETRIES,
    DEFAULT_URL,
    Batch,
    ClientCertificate,
    ClientKey,
    Deadline,
    Dimensions,
    File,
    Header,
    Model,
    Overlap,
    PriorityChoice,
    Prompt,
    Retries,
    RootCertificate,
    Server,
    Stdin,
    TextArguments,
    Timeout,
    Token,
    TruncateChoice,
    TruncateOption,
    Url,
    call_options,
    errors_to_exit_codes,
)
from clients.commands.output import check_writable, short, with_bar, write_lines, write_npy
from clients.commands.source import given_texts, lines_named
from clients.result import EncodeResult


def encode(
    texts: TextArguments = None,
    file: File = None,
    stdin: Stdin = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the embeddings to this .npy file, float32 [n, dim]; all or nothing.")
    ] = None,
    prompt: Prompt = None,
    dimensions: Dimensions = None,
    url: Url = DEFAULT_URL,
    model: Model = "encode",
    batch: Batch = 32,
    priority: PriorityChoice = None,
    timeout: Timeout = None,
    deadline: Deadline = None,
    truncate: TruncateChoice = TruncateOption.END,
    overlap: Overlap = None,
    retries: Retries = DEFAULT_RETRIES,
    token: Token = None,
    header: Header = None,
    root_certificate: RootCertificate = None,
    client_certificate: ClientCertificate = None,
    client_key: ClientKey = None,
) -> None:
    """Encode texts: one JSON object a line on stdout, or a .npy file with --output.

    A line is {"text": str, "tokens": int, "cut": int, "embedding": [float, ...]}, in the order of the texts. An empty
    line of a file is an empty text, so that line i stays row i.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(texts, file, stdin)
        if output is not None:
            check_writable(output)
        with lines_named(file):
            results = client.encode_batches(
                given,
                prompt=prompt,
                dimensions=dimensions,
                **call_options(priority, timeout, deadline, truncate, overlap),
            )
            shown = with_bar(results, given, batch, lines=output is None)
            if output is None:
                _write(shown, given)
            else:
                parts = [result.embeddings for result in shown]
                # Of no texts: as many columns as there would be.
                parts = parts or [client.encode([], dimensions=dimensions, deadline=deadline).embeddings]
                write_npy(output, np.concatenate(parts))


def _write(results: Iterator[EncodeResult], texts: list[str]) -> None:
    """The lines of each request, as soon as they are there."""
    number = 0
    for result in results:
        rows: list[dict[str, Any]] = []
        for embedding, tokens, cut in result:
            rows.append({"text": texts[number], "tokens": tokens, "cut": cut, "embedding": short(embedding)})
            number += 1
        write_lines(rows)
