"""What a request asks: its texts and its options, or the reason it is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import Refusal

Truncate = Literal["end", "error"]
TRUNCATE = ("end", "error")


@dataclass(frozen=True)
class Question:
    """The texts of one request, decoded, and how to cut them."""

    texts: tuple[str, ...]
    truncate: Truncate


def shown(value: object, most: int = 100) -> str:
    """A value for a message: a client's megabyte must not come back in an error, which travels in headers."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def read_question(
    texts: NDArray[np.object_], parameters: str, max_text_bytes: int, max_request_bytes: int
) -> Question | Refusal:
    """Decode a request.

    Args:
        texts: TEXT, BYTES [n, 1], UTF-8.
        parameters: the request's custom parameters as a JSON object, or an empty string.
        max_text_bytes: longest text accepted, bytes.
        max_request_bytes: most bytes of all texts together.

    Returns:
        The question, or a refusal that names the first text at fault. The whole request is refused then, no other.
    """
    if texts.ndim != 2 or texts.shape[1] != 1:
        return Refusal("invalid", f"TEXT has shape {list(texts.shape)}; limit: [n, 1]; send one text a row")
    options: dict[str, Any] = json.loads(parameters) if parameters else {}
    truncate = options.get("truncate", "end")
    if truncate not in TRUNCATE:
        return Refusal("invalid", f"parameter truncate is {shown(truncate)}; allowed: 'end' or 'error'")
    total = sum(map(len, texts[:, 0]))
    if len(texts) > 1 and total > max_request_bytes:
        return Refusal(
            "invalid",
            f"the texts have {total} bytes together; limit: {max_request_bytes} a request (entry.max_request_bytes); "
            "send fewer texts at once",
        )
    decoded = []
    for index, item in enumerate(texts[:, 0].tolist()):
        if len(item) > max_text_bytes:
            return Refusal(
                "invalid",
                f"text {index} has {len(item)} bytes; limit: {max_text_bytes} (entry.max_text_bytes); split the text",
            )
        try:
            decoded.append(item.decode("utf-8"))
        except UnicodeDecodeError as error:
            return Refusal(
                "invalid",
                f"text {index} is not UTF-8: byte 0x{item[error.start]:02x} at position {error.start}; "
                "encode the text as UTF-8",
            )
    return Question(tuple(decoded), truncate)
