"""From what the lanes answered to what a request gets back; one module a kind of task.

A task is a callable with the name of its output tensor: it takes a finished ticket and gives one row per text. What the
windows of a long text add up to is decided here too.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..config import EntryConfig
from ..ticket import Ticket
from ..tokenise import Tokeniser
from .answers import Answers
from .embedding import Embedding
from .entities import Entities
from .scores import BestScores, MeanScores


class Task(Protocol):
    """What a model answers."""

    #: Name of the output tensor.
    output: str

    def __call__(self, ticket: Ticket) -> NDArray[Any]:
        """One row per text.

        Args:
            ticket: complete and not refused.
        """
        ...


def open_task(config: EntryConfig, tokenise: Tokeniser) -> Task:
    """The task a configuration names.

    Raises:
        ValueError: no such task.
    """
    match config.task:
        case "embedding":
            return Embedding(size=config.size, normalize=config.normalize)
        case "classification":
            return MeanScores(size=config.size)
        case "reranking":
            return BestScores(size=config.size)
        case "tagging":
            return Entities(config.labels, tokenise)
        case "answering":
            return Answers(config.max_answer_tokens)
    raise ValueError(f"task {config.task!r} is not known; render the configuration again")


def answer_tensors(task: Task, ticket: Ticket) -> dict[str, NDArray[Any]]:
    """The outputs of a complete request by name: the task's own, TOKENS INT32 [n, 1] and CUT INT32 [n, 1]."""
    return {
        task.output: task(ticket),
        "TOKENS": np.array([[text.used] for text in ticket.tokens], dtype=np.int32),
        "CUT": np.array([[text.cut] for text in ticket.tokens], dtype=np.int32),
    }
