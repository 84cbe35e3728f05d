"""What a request asks: its texts and its options, or the reason it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import Refusal

Truncate = Literal["end", "error"]
TRUNCATE = ("end", "error")


@dataclass(frozen=True)
class Question:
    """The texts of one request, decoded, and how to cut them."""

    texts: tuple[str, ...]
    truncate: Truncate


def read_question(raw: Iterable[bytes], parameters: str, max_text_bytes: int) -> Question | Refusal:
    """Decode a request.

    Args:
        raw: the elements of TEXT, UTF-8.
        parameters: the request's custom parameters as a JSON object, or an empty string.
        max_text_bytes: longest text accepted, bytes.

    Returns:
        The question, or a refusal that names the first text at fault. The whole request is refused then, no other.
    """
    options: dict[str, Any] = json.loads(parameters) if parameters else {}
    truncate = options.get("truncate", "end")
    if truncate not in TRUNCATE:
        return Refusal("invalid", f"parameter truncate is {truncate!r}; allowed: 'end' or 'error'")
    texts = []
    for index, item in enumerate(raw):
        if len(item) > max_text_bytes:
            return Refusal(
                "invalid",
                f"text {index} has {len(item)} bytes; limit: {max_text_bytes} (entry.max_text_bytes); split the text",
            )
        try:
            texts.append(item.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Refusal(
                "invalid",
                f"text {index} is not UTF-8: byte 0x{item[error.start]:02x} at position {error.start}; "
                "encode the text as UTF-8",
            )
    return Question(tuple(texts), truncate)
