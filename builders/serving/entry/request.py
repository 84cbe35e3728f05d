"""What a request asks: its texts and its options, or the reason it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .config import LEVELS, Aggregation, EntryConfig, Level
from .errors import Refusal

Truncate = Literal["end", "start", "error", "chunk"]
TRUNCATE: tuple[Truncate, ...] = get_args(Truncate)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
#: Parameters that only one task knows.
_TASK_OF = {"prompt": "embedding", "dimensions": "embedding", "aggregation": "tagging"}


@dataclass(frozen=True)
class Options:
    """How the texts of a request are to be read and answered.

    Attributes:
        truncate: what happens to a text that is too long: cut its `end`, its `start`, `error`, or `chunk`.
        overlap: tokens that two windows share; None: the model's own number, less where little room is.
        prompt: text put before each text, "" for none.
        dimensions: size of the vectors; None: the model's own.
        aggregation: how tokens become entities.
        level: order inside the long lane, from the parameter `class`; Triton does not tell a model the `priority`.
    """

    truncate: Truncate = "end"
    overlap: int | None = None
    prompt: str = ""
    dimensions: int | None = None
    aggregation: Aggregation = "simple"
    level: Level = "background"


@dataclass(frozen=True)
class Question:
    """The texts of one request, decoded, and its options.

    Attributes:
        texts: one a row; without the prompt.
        pairs: the second text of each row, or None when the request has none.
        options: how to read and answer them.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    options: Options = Options()


class RequestError(Exception):
    """Carries the message of a refusal out of a check."""


def shown(value: object, most: int = 100) -> str:
    """A value for a message: a client's megabyte must not come back in an error, which travels in headers."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def read_question(
    texts: NDArray[np.object_], pairs: NDArray[np.object_] | None, parameters: str, config: EntryConfig
) -> Question | Refusal:
    """Decode a request.

    Args:
        texts: TEXT, BYTES [n, 1], UTF-8.
        pairs: TEXT_PAIR, as TEXT, or None when the request has none.
        parameters: the request's custom parameters as a JSON object, or an empty string.
        config: the entry's settings.

    Returns:
        The question, or a refusal that names the first text at fault. The whole request is refused then, no other.
    """
    try:
        rows = [_column("TEXT", texts)]
        if _takes_pairs(pairs, config):
            rows.append(_column("TEXT_PAIR", pairs))
            if len(rows[0]) != len(rows[1]):
                raise RequestError(
                    f"TEXT_PAIR has {len(rows[1])} rows; limit: {len(rows[0])}, one for each row of TEXT; "
                    "send both with the same rows"
                )
        options = read_options(json.loads(parameters) if parameters else {}, config)
        _check_sizes(rows, config)
        decoded = [_decoded(column, what) for column, what in zip(rows, ("text", "the pair of text"), strict=False)]
    except RequestError as refused:
        return Refusal("invalid", str(refused))
    return Question(decoded[0], decoded[1] if len(decoded) == 2 else None, options)


def read_options(parameters: dict[str, Any], config: EntryConfig) -> Options:
    """Check a request's parameters; names that nobody here knows are left alone.

    Raises:
        RequestError: a value is not allowed, or a parameter does not go with the model's task.
    """
    for name, task in _TASK_OF.items():
        if name in parameters and config.task != task:
            raise RequestError(
                f"parameter {name} is {shown(parameters[name])}; it is for models whose task is {task}, and this "
                f"model's task is {config.task}; leave it out"
            )
    truncate = _choice(parameters, "truncate", TRUNCATE, "end")
    return Options(
        truncate=truncate,
        overlap=_overlap(parameters, truncate, config),
        prompt=_prompt(parameters, config),
        dimensions=_dimensions(parameters, config),
        aggregation=_choice(parameters, "aggregation", AGGREGATIONS, config.aggregation),
        level=_choice(parameters, "class", LEVELS, "background"),
    )


def _choice(parameters: dict[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = parameters.get(name, default)
    # A JSON value may be a list, which cannot be looked up in a set, or true, which equals 1.
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"parameter {name} is {shown(value)}; allowed: {_listed(map(repr, allowed))}")
    return value


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"parameter {name} is {shown(value)}; limit: a whole number; send it as an integer")
    return value


def _overlap(parameters: dict[str, Any], truncate: Truncate, config: EntryConfig) -> int | None:
    if "overlap" not in parameters:
        return None
    overlap = _integer("overlap", parameters["overlap"])
    if not 0 <= overlap < config.max_tokens:
        raise RequestError(
            f"parameter overlap is {shown(overlap)}; limit: 0 to less than a window of {config.max_tokens} tokens; "
            "send a number between"
        )
    if truncate != "chunk":
        raise RequestError(
            f"parameter overlap is {overlap}, but truncate is {truncate!r}; it only goes with truncate='chunk'; "
            "send that too, or leave overlap out"
        )
    return overlap


def _prompt(parameters: dict[str, Any], config: EntryConfig) -> str:
    name = parameters.get("prompt", config.default_prompt if config.task == "embedding" else None)
    if name is None and "prompt" not in parameters:
        return ""
    if name == "":
        return ""
    if not isinstance(name, str) or name not in config.prompts:
        known = _listed(map(repr, config.prompts)) if config.prompts else "none, the model has no prompts"
        raise RequestError(f"parameter prompt is {shown(name)}; allowed: {known}; '' for no prompt")
    return config.prompts[name]


def _dimensions(parameters: dict[str, Any], config: EntryConfig) -> int | None:
    if "dimensions" not in parameters:
        return None
    size = _integer("dimensions", parameters["dimensions"])
    allowed = sorted({*config.dimensions, config.size})
    if size not in allowed:
        raise RequestError(
            f"parameter dimensions is {shown(size)}; allowed: {_listed(map(str, allowed))} (model.dimensions and the "
            "model's own size)"
        )
    return None if size == config.size else size


def _listed(values: Iterable[str]) -> str:
    """The values as `a, b or c`."""
    *some, last = values
    return f"{', '.join(some)} or {last}" if some else last


def _takes_pairs(pairs: NDArray[np.object_] | None, config: EntryConfig) -> bool:
    if pairs is None and config.pair == "required":
        raise RequestError(f"TEXT_PAIR is missing; the task {config.task} needs one for each row of TEXT; send both")
    if pairs is not None and config.pair == "none":
        raise RequestError(f"TEXT_PAIR was sent; the task {config.task} takes single texts; send TEXT alone")
    return pairs is not None


def _column(name: str, tensor: NDArray[np.object_] | None) -> list[bytes]:
    if tensor is None or tensor.ndim != 2 or tensor.shape[1] != 1:
        shape = [] if tensor is None else list(tensor.shape)
        raise RequestError(f"{name} has shape {shape}; limit: [n, 1]; send one text a row")
    items: list[bytes] = tensor[:, 0].tolist()
    return items


def _check_sizes(rows: list[list[bytes]], config: EntryConfig) -> None:
    """Hold every text, with its pair, and all of them together to their limits in bytes."""
    sizes = [sum(map(len, row)) for row in zip(*rows, strict=True)]
    total, most = sum(sizes), config.max_request_bytes
    if len(sizes) > 1 and total > most:
        raise RequestError(
            f"the texts have {total} bytes together; limit: {most} a request (entry.max_request_bytes); "
            "send fewer texts at once"
        )
    for index, size in enumerate(sizes):
        if size > config.max_text_bytes:
            have = f"text {index} has" if len(rows) == 1 else f"text {index} and its pair have"
            raise RequestError(
                f"{have} {size} bytes; limit: {config.max_text_bytes} (entry.max_text_bytes); split the text"
            )


def _decoded(items: list[bytes], what: str) -> tuple[str, ...]:
    decoded = []
    for index, item in enumerate(items):
        try:
            decoded.append(item.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{what} {index} is not UTF-8: byte 0x{item[error.start]:02x} at position {error.start}; "
                "encode the text as UTF-8"
            ) from error
    return tuple(decoded)
