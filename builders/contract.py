"""What goes into a lane and comes out of it: names, types and shapes, by the task of the model."""

from __future__ import annotations

from dataclasses import dataclass

#: Input of the entry.
TEXT, TEXT_PAIR = "TEXT", "TEXT_PAIR"
INPUTS = ("input_ids", "length")
SEGMENT = "segment_start"
OUTPUT = "EMBEDDING"


@dataclass(frozen=True)
class Contract:
    """The tensors of a lane (docs/architecture.md).

    `input_ids` INT32 [b, L], `length` INT32 [b, 1] and, for pairs of a model with token types, `segment_start` INT32
    [b, 1] -> one output, FP32 [b, size] or, with a row for each token, [b, L, size].
    """

    output: str = OUTPUT
    """Name of the output."""
    size: int = 1
    """Its last axis."""
    per_token: bool = False
    """The output has a row for each token, padding included."""
    segment: bool = False
    """The lane takes `segment_start`, the place of the first token of the second text (`length` when there is none)."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in their order."""
        return (*INPUTS, SEGMENT) if self.segment else INPUTS

    def widths(self, length: int) -> dict[str, int]:
        """Each input's last axis in a bucket of `length` tokens."""
        return {name: length if name == "input_ids" else 1 for name in self.inputs}

    def dims(self, length: int) -> list[int]:
        """The output's shape in a bucket of `length` tokens, without the batch."""
        return [length, self.size] if self.per_token else [self.size]
