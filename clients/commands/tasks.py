"""`classify`, `rerank`, `similarity`, `tag`, `answer`: texts in, JSON lines out."""

from __future__ import annotations

from typing import Annotated

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
from clients.commands.output import short, wants_bar, write_lines
from clients.commands.source import given_texts, lines_named
from clients.options import Aggregation


def classify(
    texts: TextArguments = None,
    file: File = None,
    stdin: Stdin = False,
    pair: Annotated[str | None, typer.Option(help="A second text that goes with each of the texts.")] = None,
    top_k: Annotated[int | None, typer.Option(help="How many labels of each text; left out: all.")] = None,
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
    """Classify texts: one JSON object a line, the best label first.

    A line is {"text": str, "tokens": int, "cut": int, "labels": [{"label": str, "score": float}, ...]}.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(texts, file, stdin)
        with lines_named(file):
            result = client.classify(
                given,
                pairs=None if pair is None else [pair] * len(given),
                top_k=top_k,
                **call_options(priority, timeout, deadline, truncate, overlap, bar=wants_bar(given, batch)),
            )
        write_lines(
            {
                "text": text,
                "tokens": int(tokens),
                "cut": int(cut),
                "labels": [{"label": one.label, "score": round(one.score, 6)} for one in labels],
            }
            for text, labels, tokens, cut in zip(given, result, result.tokens, result.cut, strict=True)
        )


def rerank(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What is looked for.")],
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="DOCUMENT", help="Documents; a single - reads stdin.")
    ] = None,
    file: File = None,
    stdin: Stdin = False,
    top_n: Annotated[int | None, typer.Option(help="How many documents; left out: all.")] = None,
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
    """Sort documents by their score for a query: one JSON object a line, the best first.

    A line is {"index": int, "score": float, "document": str}; index counts the documents from 0.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(documents, file, stdin, "DOCUMENT")
        with lines_named(file):
            result = client.rerank(
                query,
                given,
                top_n=top_n,
                **call_options(priority, timeout, deadline, truncate, overlap, bar=wants_bar(given, batch)),
            )
        write_lines({"index": one.index, "score": round(one.score, 6), "document": one.document} for one in result)


def similarity(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to compare with.")],
    texts: TextArguments = None,
    file: File = None,
    stdin: Stdin = False,
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
    """Cosine of a text's embedding with others': one JSON object a line, in the order of the texts.

    A line is {"text": str, "cosine": float}.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(texts, file, stdin)
        cosines = client.similarity(
            query,
            given,
            prompt=prompt,
            dimensions=dimensions,
            **call_options(priority, timeout, deadline, truncate, overlap, bar=wants_bar(given, batch)),
        )
        write_lines({"text": text, "cosine": cosine} for text, cosine in zip(given, short(cosines[0]), strict=True))


def tag(
    texts: TextArguments = None,
    file: File = None,
    stdin: Stdin = False,
    aggregation: Annotated[
        Aggregation | None, typer.Option(help="How tokens become entities; left out: the model's own.")
    ] = None,
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
    """Find entities in texts: one JSON object a line, in the order of the texts.

    A line is {"text": str, "entities": [{"label": str, "score": float, "word": str, "start": int, "end": int}, ...]}.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(texts, file, stdin)
        with lines_named(file):
            result = client.tag(
                given,
                aggregation=aggregation,
                **call_options(priority, timeout, deadline, truncate, overlap, bar=wants_bar(given, batch)),
            )
        write_lines(
            {"text": text, "entities": [one._asdict() for one in entities]}
            for text, entities in zip(given, result, strict=True)
        )


def answer(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What is asked.")],
    contexts: Annotated[
        list[str] | None, typer.Argument(metavar="CONTEXT", help="Texts to find the answer in; a single - reads stdin.")
    ] = None,
    file: File = None,
    stdin: Stdin = False,
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
    """Find the answer to a question in each context: one JSON object a line, in the order of the contexts.

    A line is {"context": str, "text": str, "score": float, "start": int, "end": int}.
    """
    server = Server(url, model, batch, retries, token, header, root_certificate, client_certificate, client_key)
    with errors_to_exit_codes(), server.connect() as client:
        given = given_texts(contexts, file, stdin, "CONTEXT")
        with lines_named(file):
            result = client.answer(
                question,
                given,
                **call_options(priority, timeout, deadline, truncate, overlap, bar=wants_bar(given, batch)),
            )
        write_lines({"context": context, **one._asdict()} for context, one in zip(given, result, strict=True))
