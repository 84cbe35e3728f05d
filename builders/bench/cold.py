"""A build without its warm-up, for the rows of the ladder above the one that switches it on.

No setting turns it off: a server is not ready before it is warm. So it is taken out of the files of a finished build,
which must be in a folder of its own: they are no longer what the builders published. For the CPU engine alone; one on
a GPU allocates nothing after its warm-up.
"""

from __future__ import annotations

from pathlib import Path

from builders.bench.driver import BenchError
from builders.build import BuildResult

# Both names are looked up when Triton initialises the model, so that the last definition is the one that runs.
_LANE = """

def warm_up(engine, config):  # put here by builders/bench/cold.py
    pass
"""
_ENTRY = """

class FirstCalls(FirstCalls):  # put here by builders/bench/cold.py
    def _work(self):
        self._done()  # at once: the server waits for it before it says ready
"""


def leave_cold(built: BuildResult) -> None:
    """Takes the warm-up out of every lane and the entry of a finished build.

    Raises:
        BenchError: the build's files do not have it where it is looked for.
    """
    version = str(built.version)
    for bucket in built.plan.buckets:
        _append(built.repository / bucket.model / version / "model.py", "warm_up", _LANE)
    _append(built.repository / built.entry_model / version / "model.py", "FirstCalls", _ENTRY)


def _append(path: Path, name: str, code: str) -> None:
    text = path.read_text(encoding="utf-8")
    if f"import {name}" not in text and f", {name}" not in text:
        raise BenchError(f"the model does not import {name}", value=str(path), remedy="correct builders/bench/cold.py")
    # A new file: the published one may be a link that other versions share.
    path.unlink()
    path.write_text(text + code, encoding="utf-8")
