"""The container's log as one JSON object a line, for those who collect logs (LOG_FORMAT=json).

    {"time": "2026-11-29T18:24:16Z", "level": "info", "source": "tritonserver", "place": "model.py:97", "message": ""}

Triton knows no JSON of its own: its lines are read and written anew. What is no line of Triton's log (tables, what a
model prints) is kept as the message. Standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from datetime import UTC, datetime
from typing import IO, TextIO

_LEVELS = {"V": "debug", "I": "info", "W": "warning", "E": "error", "F": "fatal"}
#: Triton's two forms: --log-format=ISO8601, and its default, which its stubs always use.
_ISO = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) (?P<level>[VIWEF]) \d+ (?P<place>[^\s\]]+)\] (?P<message>.*)")
_SHORT = re.compile(r"(?P<level>[VIWEF])\d{4} [\d:.]+ \d+ (?P<place>[^\s\]]+)\] (?P<message>.*)")


def is_json(environment: dict[str, str] | os._Environ[str] = os.environ) -> bool:
    """Whether LOG_FORMAT asks for JSON.

    Raises:
        ValueError: it is neither `text` nor `json`.
    """
    asked = environment.get("LOG_FORMAT", "") or "text"
    if asked not in ("text", "json"):
        raise ValueError(f"LOG_FORMAT is {asked!r}: give text or json")
    return asked == "json"


def as_json(line: str, source: str = "tritonserver", level: str = "info") -> str:
    """One line of a log as a JSON object.

    Args:
        line: without its end.
        source: who wrote it.
        level: where the line does not say.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = {"time": now, "level": level, "source": source}
    found = _ISO.fullmatch(line) or _SHORT.fullmatch(line)
    if not found:
        return json.dumps({**entry, "message": line}, ensure_ascii=False)
    parts = found.groupdict()
    entry |= {"time": parts.get("time") or now, "level": _LEVELS[parts["level"]], "place": parts["place"]}
    return json.dumps({**entry, "message": _unquoted(parts["message"])}, ensure_ascii=False)


def say(text: str) -> None:
    """One line of the launcher's own."""
    line = as_json(text, "launch") if os.environ.get("LOG_FORMAT") == "json" else f"launch: {text}"
    print(line, file=sys.stderr, flush=True)


def relay(stream: IO[bytes], output: TextIO = sys.stderr) -> threading.Thread:
    """Write what comes out of `stream` to `output` as JSON, until it ends; in a thread of its own."""

    def work() -> None:
        for raw in stream:
            line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            if line:
                print(as_json(line), file=output, flush=True)

    thread = threading.Thread(target=work, name="log", daemon=True)
    thread.start()
    return thread


def _unquoted(message: str) -> str:
    """The text of a message that Triton wrote as a JSON string, with its line ends."""
    # Nothing else is read as JSON: brackets from a client's text, deep enough, would end the thread that relays.
    if not message.startswith('"'):
        return message.strip()
    try:
        return str(json.loads(message))
    except ValueError:
        return message.strip()
