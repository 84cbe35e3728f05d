"""Letting a server finish what it has accepted, before it is told to stop."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from builders.errors import ControlError
from builders.http_api import HttpApi

_POLL_S = 0.1


def drain(api: HttpApi, models: Sequence[str], timeout_s: float, ended: threading.Event) -> bool:
    """Unload models and wait until they have answered all that they had accepted; new requests are refused meanwhile.

    On a signal alone Triton 2.51 refuses the calls of one model to another as soon as no request waits in a queue,
    whatever is still being computed, so that accepted requests fail. An unload lets a model finish, and the models
    that it calls are still there.

    Args:
        api: the server's, with the key of the model control API where that is restricted.
        models: the models that clients call; they finish side by side.
        timeout_s: how long to wait for all of them, seconds.
        ended: set when the server has ended by itself.

    Returns:
        True when all are unloaded; False when one is not in time, or the server refuses to unload one.
    """
    until = time.monotonic() + timeout_s
    asked = [_post(api, f"/v2/repository/models/{urllib.parse.quote(model, safe='')}/unload") for model in models]
    waiting = {model for model, answer in zip(models, asked, strict=True) if answer is not None}
    while time.monotonic() < until and not ended.is_set():
        index = _post(api, "/v2/repository/index")
        if index is None:
            return False
        if not any(entry.get("name") in waiting and entry.get("state") in ("READY", "UNLOADING") for entry in index):
            return len(waiting) == len(models)
        ended.wait(_POLL_S)
    return False


def _post(api: HttpApi, path: str) -> Any:
    """The JSON answer, or None for anything but success."""
    try:
        status, answer = api.ask("POST", path)
    except (ControlError, TimeoutError):
        return None
    return answer if status == 200 else None
