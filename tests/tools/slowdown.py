"""A planted slow-down: bucket models of a finished build that take a known share more of CPU time."""

from __future__ import annotations

from pathlib import Path

from builders.build import BuildResult

# Burnt, not slept: on a CPU that is busy anyway, a sleeping lane would leave its time to the others.
_SLOWED = """

import time  # planted by tests/tools/slowdown.py

_fast_execute = TritonPythonModel.execute


def _slow_execute(self, requests):
    began = time.thread_time()
    responses = _fast_execute(self, requests)
    until = time.thread_time() + SHARE * (time.thread_time() - began)
    while time.thread_time() < until:
        pass
    return responses


TritonPythonModel.execute = _slow_execute
"""


def slow_down(built: BuildResult, share: float) -> None:
    """Let every bucket model with a Python engine take `share` (of 1) more CPU time a batch.

    The build must be in a folder of its own: its files are no longer what the builders published.
    """
    for model in built.models:
        path: Path = built.repository / model / str(built.version) / "model.py"
        if model.startswith("encoder_") and path.is_file():
            path.write_text(path.read_text(encoding="utf-8") + _SLOWED.replace("SHARE", repr(share)), encoding="utf-8")
