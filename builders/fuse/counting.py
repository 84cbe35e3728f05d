"""Consecutive numbers in a graph: 0, 1, 2, ... up to the length of the batch, in any spelling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.fuse.graph import attribute, constant, operands, producer, scalar


@dataclass(frozen=True)
class Counting:
    """first, first + 1, ..., first + length - 1 along one axis."""

    first: int
    """The first number."""
    length: ir.Value
    """INT64 [1], how many: read from the shape of an input."""


def counted(value: ir.Value | None) -> Counting | None:
    """What a value counts, None where it is anything else (a constant, frozen count included)."""
    node = producer(value, "Unsqueeze", "Cast", "Identity")
    if node is not None:
        return counted(node.inputs[0])
    node = producer(value, "Add")
    if node is not None:
        for inner, offset in operands(node):
            number, found = scalar(offset), counted(inner)
            if number is not None and number == int(number) and found is not None:
                return Counting(found.first + int(number), found.length)
        return None
    node = producer(value, "Range")
    if node is not None:
        return _range(node)
    node = producer(value, "Slice")
    return None if node is None else _slice(node)


def length_of(value: ir.Value | None) -> ir.Value | None:
    """INT64 [1] with one size of an input's shape, behind the casts and squeezes that make a scalar of it."""
    node = producer(value, "Cast", "Squeeze", "Unsqueeze", "Reshape", "Identity")
    if node is not None:
        return length_of(node.inputs[0])
    node = producer(value, "Shape")
    # The exporters of torch cut the shape themselves: one size a Shape node.
    one = node is not None and attribute(node, "end", -1) == attribute(node, "start", 0) + 1
    source = node.inputs[0] if node is not None else None
    return value if one and source is not None and constant(source) is None else None


def _range(node: ir.Node) -> Counting | None:
    start, step, length = scalar(node.inputs[0]), scalar(node.inputs[2]), length_of(node.inputs[1])
    return Counting(0, length) if start == 0 and step == 1 and length is not None else None


def _slice(node: ir.Node) -> Counting | None:
    """A stored count (transformers' position_ids buffer) cut at the batch's length: the form this package makes."""
    numbers = constant(node.inputs[0])
    starts, length = constant(node.inputs[1]), length_of(node.inputs[2])
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else np.array([0])
    if numbers is None or length is None or starts is None or axes is None or starts.tolist() != [0]:
        return None
    if numbers.size != max(numbers.shape, default=0) or not np.issubdtype(numbers.dtype, np.integer):
        return None
    if numbers.shape[int(axes[0])] != numbers.size or not (np.diff(numbers.reshape(-1)) == 1).all():
        return None
    return Counting(int(numbers.reshape(-1)[0]), length)
