"""`make demo`: the whole path once, on real texts: build, serve, ask, show, stop."""

from __future__ import annotations

import re
import statistics
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pydoc_data import topics

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from builders.bucket import Bucket
from builders.build import BuildResult
from builders.demo_tasks import show_task
from builders.ports import free_ports
from builders.server import TritonServer
from builders.server_checks import entry_facts
from builders.triton_log import ServerEvent
from clients import EncoderClient, EncoderError, EncodeResult

QUERY = "How do I stop a program that runs too long?"
SENTENCES = (
    "Press Ctrl-C to interrupt the process, or send it SIGTERM.",
    "A timeout ends a computation that takes more time than it may.",
    "The cat slept on the warm windowsill all afternoon.",
    "Boil the pasta for nine minutes and keep a cup of the water.",
    "The train to Vienna leaves from platform seven at noon.",
    "Water freezes at zero degrees Celsius under normal pressure.",
    "Ein kurzer deutscher Satz, und ein Emoji dazu: 🚲",
)
#: Pages of Python's own documentation: real prose of any length, on every machine.
TOPICS = ("assert", "break", "while", "try", "with", "class")


@dataclass(frozen=True)
class Question:
    """One request of the demo."""

    text: str
    priority: str
    truncate: str = "end"


@dataclass(frozen=True)
class Answer:
    """What a question got: `result` or `error`, after `seconds`."""

    question: Question
    seconds: float
    result: EncodeResult | None = None
    error: str = ""


def run_demo(built: Sequence[BuildResult], console: Console) -> None:
    """Serve the built models of a repository, send each the demo's questions all at once, print the answers.

    Raises:
        ServerError: the server did not start.
        RuntimeError: a question that should have been answered was not.
    """
    began = time.perf_counter()

    def show(event: ServerEvent) -> None:
        if event.kind in ("loaded", "error"):
            console.print(f"  {escape(event.text)}", style="dim", soft_wrap=True)

    models = [model for part in built for model in part.models]
    entries = [part.entry_model for part in built]
    console.print(f"starting tritonserver with {len(models)} models")
    with TritonServer(built[0].repository, models, ports=free_ports(), drain_models=entries, on_event=show) as server:
        console.print(f"ready after {time.perf_counter() - began:.1f} s: gRPC {server.grpc_url}, {server.http_url}")
        for part in built:
            facts = entry_facts(part.repository, part.entry_model)
            if facts.get("task", "embedding") == "embedding":
                _show_embeddings(server.grpc_url, part, console)
            else:
                show_task(server.grpc_url, part.entry_model, facts, console)
        console.print("stopping the server")
    console.print("stopped")


def _show_embeddings(url: str, built: BuildResult, console: Console) -> None:
    """Ask one model all questions at once and print what it answered."""
    questions = _questions(built.plan.max_tokens)
    with EncoderClient(url, model=built.entry_model) as client, ThreadPoolExecutor(len(questions)) as pool:
        sent = time.perf_counter()
        answers = list(pool.map(lambda question: _ask(client, question), questions))
        elapsed = time.perf_counter() - sent
        query = client.encode(QUERY, priority="interactive")
    console.print(_answer_table(answers, built))
    console.print(_neighbour_table(query, answers))
    for answer in answers:
        if answer.result is None:
            console.print(f"refused {escape(answer.question.text[:20])!r}…: {escape(answer.error)}", soft_wrap=True)
    _summary(answers, elapsed, console)


def _questions(max_tokens: int) -> list[Question]:
    """Short and long texts, alternately interactive and background, and one that must be refused."""
    pages = [" ".join(re.sub(r"[*=]{3,}", "", topics.topics[name]).split()) for name in TOPICS]
    # The longest pages together fill the longest bucket of any model that is served here.
    pages.append(" ".join(pages)[: max_tokens * 4])
    texts = [*SENTENCES, *pages]
    levels = ("interactive", "interactive", "background")
    questions = [Question(text, levels[number % 3]) for number, text in enumerate(texts)]
    return [*questions, Question("word " * (max_tokens + 100), "interactive", truncate="error")]


def _ask(client: EncoderClient, question: Question) -> Answer:
    began = time.perf_counter()
    try:
        result = client.encode(
            question.text,
            priority=1 if question.priority == "interactive" else 2,
            truncate="error" if question.truncate == "error" else "end",
        )
    except EncoderError as error:
        return Answer(question, time.perf_counter() - began, error=str(error))
    return Answer(question, time.perf_counter() - began, result)


def _answer_table(answers: list[Answer], built: BuildResult) -> Table:
    """One row per answered question; fits a terminal of 80 columns."""
    named = f"{built.entry_model}: " if built.name else ""
    table = Table(title=f"{named}{built.source.folder.name}, all sent at once", box=None, pad_edge=False)
    table.add_column("text", no_wrap=True)
    for name in ("priority", "tokens", "cut", "bucket", "lane", "ms", "first numbers"):
        numeric = name in ("tokens", "cut", "bucket", "ms")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for answer in answers:
        if answer.result is None:
            continue
        tokens, cut = int(answer.result.tokens[0]), int(answer.result.cut[0])
        bucket: Bucket = built.plan.bucket_of(tokens)
        numbers = " ".join(f"{value:+.2f}" for value in answer.result.embeddings[0, :2])
        table.add_row(
            escape(textwrap.shorten(answer.question.text, 17, placeholder="…")),
            answer.question.priority,
            str(tokens),
            str(cut),
            str(bucket.length),
            bucket.lane,
            f"{answer.seconds * 1000:.0f}",
            numbers,
        )
    return table


def _neighbour_table(query: EncodeResult, answers: list[Answer]) -> Table:
    table = Table(title=f"nearest to: {QUERY}", box=None, pad_edge=False)
    table.add_column("cosine", justify="right", no_wrap=True)
    table.add_column("text", max_width=70, no_wrap=True, overflow="ellipsis")
    found = [answer for answer in answers if answer.result is not None]
    vectors = np.concatenate([answer.result.embeddings for answer in found if answer.result is not None])
    cosines = _cosines(query.embeddings[0], vectors)
    for place in np.argsort(-cosines)[:3]:
        table.add_row(f"{cosines[place]:.3f}", escape(found[place].question.text))
    return table


def _cosines(query: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    cosines: NDArray[np.float32] = vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))
    return cosines


def _summary(answers: list[Answer], elapsed: float, console: Console) -> None:
    """One line of result; the demo fails when anything but the one bad request was refused."""
    refused = [answer for answer in answers if answer.result is None]
    expected = [answer for answer in answers if answer.question.truncate == "error"]
    latencies = [answer.seconds * 1000 for answer in answers if answer.result is not None]
    console.print(
        f"{len(latencies)} answered, {len(refused)} refused; "
        f"{elapsed:.2f} s in all, median {statistics.median(latencies):.0f} ms, longest {max(latencies):.0f} ms",
        soft_wrap=True,
    )
    if refused != expected:
        raise RuntimeError(f"refused: {[answer.error for answer in refused]}; expected the too long text alone")
