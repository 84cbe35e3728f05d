"""The demo's questions to a model that answers something else than embeddings: labels, scores, names, spans."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from rich.console import Console
from rich.markup import escape
from rich.table import Table

QUESTION = "When does the train to Vienna leave?"
TEXTS = (
    "The train to Vienna leaves from platform seven at noon.",
    "Boil the pasta for nine minutes and keep a cup of the water.",
    "Ada Lovelace wrote to Charles Babbage from London.",
)


def show_task(url: str, entry: str, facts: Mapping[str, Any], console: Console) -> None:
    """Send the demo's texts (as pairs with a question where the model takes nothing else) and print each answer.

    Args:
        url: the server's gRPC address.
        entry: the Triton model.
        facts: the entry's parameters; `task`, `pair` and `labels` are read.
        console: where to print.

    Raises:
        tritonclient.utils.InferenceServerException: the server refused them.
    """
    paired = facts.get("pair") == "required"
    columns = {"TEXT": [QUESTION] * len(TEXTS), "TEXT_PAIR": list(TEXTS)} if paired else {"TEXT": list(TEXTS)}
    with triton.InferenceServerClient(url) as client:
        result = client.infer(entry, [_text_input(name, texts) for name, texts in columns.items()], priority=1)
        outputs = [str(output.name) for output in result.get_response().outputs]
        answers = {name: result.as_numpy(name) for name in outputs}
    title = f"{entry}, {facts.get('task')}" + (f", asked: {QUESTION}" if paired else "")
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("text", max_width=30, no_wrap=True, overflow="ellipsis")
    table.add_column("answer", max_width=48)
    for row, text in enumerate(TEXTS):
        said = "; ".join(_words(rows[row], facts) for name, rows in answers.items() if name not in ("TOKENS", "CUT"))
        table.add_row(escape(text), escape(said))
    console.print(table)


def _text_input(name: str, texts: list[str]) -> Any:
    tensor = triton.InferInput(name, [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=np.object_))
    return tensor


def _words(row: Any, facts: Mapping[str, Any]) -> str:
    """One answer: JSON as it is, scores with the name of the best one."""
    if row.dtype == np.object_:
        return textwrap.shorten(bytes(row[0]).decode(), 90, placeholder="…")
    labels, best = facts.get("labels") or (), int(np.argmax(row))
    name = labels[best] if len(row) > 1 and best < len(labels) else "score"
    return f"{name} {float(row[best]):.3f}"
