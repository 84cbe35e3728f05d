"""Rotary positions (ModernBERT, NomicBERT): the cosines and sines that a graph computes of each position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.fuse.counting import Counting, counted
from builders.fuse.graph import Array, constant, producer, rank, size
from builders.fuse.relative import evaluate

#: Operators through which each position's numbers stay its own; Concat and Unsqueeze on axes that the check looks at.
_KEPT = frozenset({"Cast", "Mul", "Div", "Unsqueeze", "Concat", "Cos", "Sin"})


@dataclass(frozen=True)
class Turns:
    """cos or sin of position * frequency, [1, L, width]."""

    start: ir.Value
    """The count of the positions that it depends on, and on nothing else."""
    count: Counting
    """What that value counts."""
    output: ir.Value
    """[1, L, width], FP32."""

    def table(self, positions: int) -> Array:
        """The value of the first `positions` positions, [1, positions, width], by the graph's own nodes."""
        numbers = np.arange(self.count.first, self.count.first + positions)
        numbers = numbers.astype(self.start.dtype.numpy() if self.start.dtype else np.int64)
        if rank(self.start) == 2:
            numbers = numbers[None, :]
        elif rank(self.start) == 3:
            numbers = numbers[None, :, None]
        return np.ascontiguousarray(evaluate(self.start, self.output, numbers))


def find_turns(node: ir.Node) -> Turns | None:
    """The cosine or sine that a Cos or Sin node computes of counted positions, None for anything else."""
    output = producer(node.outputs[0], "Cos", "Sin") and node.outputs[0]
    # Positions on the middle axis and every frequency behind them: what a slice along that axis can stand for.
    if not output or rank(output) != 3 or size(output, 0) != 1 or size(output, -1) is None:
        return None
    starts: set[ir.Value] = set()
    waiting = [value for value in node.inputs if value is not None]
    while waiting:
        value = waiting.pop()
        if constant(value) is not None:
            continue
        maker = value.producer()
        if counted(value) is not None and not _is_cast_on(value):
            starts.add(value)
        elif maker is None or maker.op_type not in _KEPT:
            return None
        else:
            waiting.extend(entry for entry in maker.inputs if entry is not None)
    if len(starts) != 1:
        return None
    start = starts.pop()
    count = counted(start)
    lies = {1: True, 2: size(start, 0) == 1, 3: size(start, 0) == 1 and size(start, 2) == 1}
    return Turns(start, count, output) if count is not None and lies.get(rank(start) or 0, False) else None


def _is_cast_on(value: ir.Value) -> bool:
    """A count in floating point: its integers, in front of the cast, are what is counted."""
    return producer(value, "Cast") is not None
