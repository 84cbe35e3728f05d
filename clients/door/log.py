"""JSON logs: one line an event, one event a request. Texts and keys are never in them."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

LOGGER = "clients.door"


class JsonLines(logging.Formatter):
    """A record as one JSON object: time (UTC), level, event, and what the record brings as `extra={"door": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "door", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def write_logs(stream: TextIO | None = None) -> None:
    """Sends the door's logs and uvicorn's to a stream, stdout by default; for a process that is the door."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines())
    for name in (LOGGER, "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
