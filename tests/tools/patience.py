"""Tests that promise times, on machines that others use as well."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def patiently(test: Callable[..., None]) -> Callable[..., None]:
    """Up to three rounds: on a busy machine the client itself may stand still for as long as a promise takes."""

    @functools.wraps(test)
    def rounds(**fixtures: Any) -> None:
        for left in (2, 1, 0):
            try:
                test(**fixtures)
                return
            except AssertionError:
                if not left:
                    raise
            time.sleep(1.0)  # what is still under way
            if "rise" in fixtures:
                fixtures["rise"].begin()

    return rounds
