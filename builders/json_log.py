"""The log of `serve` as one JSON object a line, for those who collect logs (`--log-format json`).

    {"time": "2026-11-29T18:24:16.301Z", "level": "info", "source": "serve", "message": "ready    after 3.1 s"}

The names are those of the container's log (docker/logs.py), so that one rule of a collector reads both. What was read
in tritonserver's log, or seen by the supervisor, has its `event` (builders/triton_log.py) too, and `model` and
`version` where there is one.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Literal

from builders.triton_log import ServerEvent

LogFormat = Literal["text", "json"]
Level = Literal["info", "warning", "error"]
_LEVELS: dict[str, Level] = {"failed": "error", "error": "error", "warning": "warning"}


def json_line(level: Level, message: str, **more: str | int | None) -> str:
    """One line of the log, without its end.

    Args:
        level: how bad it is.
        message: the text.
        more: further fields; those that are None are left out.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    entry = {"time": now, "level": level, "source": "serve", "message": message, **more}
    return json.dumps({name: value for name, value in entry.items() if value is not None}, ensure_ascii=False)


def event_line(event: ServerEvent) -> str:
    """The line of one event, without its end."""
    level = _LEVELS.get(event.kind, "info")
    return json_line(level, event.text, event=event.kind, model=event.model, version=event.version)
