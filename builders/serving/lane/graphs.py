"""One CUDA graph per batch step: the kernels of a run, launched with one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cuda import Cuda


class Graphs:
    """The graphs of one bucket, all captured at start.

    A graph holds the addresses it was captured with, so they must not move: they lie in the arena.

    Args:
        cuda: the driver.
    """

    def __init__(self, cuda: Cuda):
        """See the class."""
        self._cuda = cuda
        self._graphs: dict[int, Any] = {}
        self.hits = 0
        """Batches that a graph ran."""
        self.misses = 0
        """Batches that were launched kernel by kernel."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a graph."""
        return tuple(self._graphs)

    def capture(self, steps: Sequence[int], run: Callable[[int], None]) -> None:
        """Capture `run(step)` for each step, after a run outside the capture in which TensorRT prepares the shape.

        Raises:
            CudaError, EngineError: it cannot be captured.
        """
        for step in steps:
            run(step)
            self._cuda.wait()

            def go(step: int = step) -> None:
                run(step)

            self._graphs[step] = self._cuda.capture(go)
            self._cuda.launch(self._graphs[step])
            self._cuda.wait()

    def launch(self, step: int) -> bool:
        """Launch the step's graph; False when there is none."""
        graph = self._graphs.get(step)
        if graph is None:
            self.misses += 1
            return False
        self._cuda.launch(graph)
        self.hits += 1
        return True

    def close(self) -> None:
        """Destroy the graphs."""
        for graph in self._graphs.values():
            self._cuda.call("cuGraphExecDestroy", graph)
        self._graphs.clear()
