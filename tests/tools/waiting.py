"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], timeout_s: float = 20.0) -> bool:
    """Whether something comes to hold in time.

    Args:
        holds: asked again and again, at first after a millisecond, after a while every 50 ms.
        timeout_s: long enough for a busy machine; only a test that fails waits so long.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.05)
    return True
