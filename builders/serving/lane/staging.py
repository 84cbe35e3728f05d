"""Staging: the tensors of a batch packed into one buffer, so that one copy carries them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import aligned

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a plan: its name, numpy's type and the shape of one row (the batch comes first, always)."""

    name: str
    dtype: Any
    row: tuple[int, ...]

    def bytes(self, rows: int) -> int:
        """Size of `rows` rows, bytes."""
        return rows * int(np.prod(self.row, dtype=np.int64)) * int(np.dtype(self.dtype).itemsize)


class Layout:
    """Where each tensor of a batch of `rows` rows lies in the packed buffer; each begins at the alignment.

    Args:
        specs: the tensors; small ones first, so that the gaps before the next one cost least.
        rows: rows of the batch.
    """

    def __init__(self, specs: Sequence[TensorSpec], rows: int):
        """See the class."""
        self.rows = rows
        self.specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.bytes(1))}
        self.offsets: dict[str, int] = {}
        end = 0
        for name, spec in self.specs.items():
            self.offsets[name] = aligned(end)
            end = self.offsets[name] + spec.bytes(rows)
        self.bytes = end
        """Length of the one copy, bytes."""

    def views(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The tensors inside a buffer of the host, without a copy: name to [rows, ...]."""
        return {
            name: buffer[self.offsets[name] : self.offsets[name] + spec.bytes(self.rows)]
            .view(spec.dtype)
            .reshape(self.rows, *spec.row)
            for name, spec in self.specs.items()
        }


class Slot:
    """The host's side of one batch: a buffer for what goes to the GPU and one for what comes back.

    Args:
        number: of the slot.
        inputs, outputs: layouts by batch step.
        buffers: UINT8, large enough for the largest of each; pinned where copies are to be asynchronous.
    """

    def __init__(
        self,
        number: int,
        inputs: Mapping[int, Layout],
        outputs: Mapping[int, Layout],
        buffers: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    ):
        """See the class."""
        self.number = number
        self.source, self.result = buffers
        self._inputs = {step: layout.views(self.source) for step, layout in inputs.items()}
        self._outputs = {step: layout.views(self.result) for step, layout in outputs.items()}

    def fill(self, step: int, parts: Sequence[Arrays]) -> int:
        """Write the rows of the parts one behind the other; the rows up to `step` get length 0.

        Padded rows keep whatever ids an earlier batch left there: valid tokens of nobody.

        Returns:
            The rows that are real.
        """
        views = self._inputs[step]
        rows = 0
        for name, view in views.items():
            rows = 0
            for part in parts:
                array = part[name]
                view[rows : rows + len(array)] = array
                rows += len(array)
            if view.shape[1:] == (1,):
                view[rows:] = 0
        return rows

    def inputs(self, step: int) -> Mapping[str, NDArray[Any]]:
        """The input tensors, one by one: name to [step, ...]."""
        return self._inputs[step]

    def outputs(self, step: int) -> Mapping[str, NDArray[Any]]:
        """The output tensors, one by one: name to [step, ...]."""
        return self._outputs[step]
