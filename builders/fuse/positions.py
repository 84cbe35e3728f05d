"""Step `positions`: learned, relative and counted positions become slices of constants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.fuse.clean import sweep
from builders.fuse.counting import counted
from builders.fuse.graph import (
    Array,
    add_constant,
    add_node,
    attribute,
    constant,
    only_use,
    operands,
    producer,
    rank,
    replace,
)
from builders.fuse.relative import find_relative
from builders.fuse.rotary import find_turns
from builders.fuse.step import Context


@dataclass(frozen=True)
class Positions:
    """No position is computed per request.

    * A learned table looked up by 0, 1, 2, ... (RoBERTa and MPNet: by pad_id + 1, ...) -> the table's rows from the
      first one used on, sliced to the length of the batch. The one row of token types, which broadcasts over all
      tokens, is added to the table beforehand.
    * Relative positions (MPNet, T5's buckets): bias[head, query, key] depends on key - query alone, so that the
      logarithms that find the bucket are computed here, once for every distance below `max_length`, and the graph
      looks distances up: [L, L] -> [heads, L, L], without the batch axis that the exporter expands.
    * Cosines and sines of rotary positions (ModernBERT) -> one table each, [1, max_length, width], computed here in
      FP32 by the graph's own nodes and sliced to the length of the batch. In FP16, a position above 2048 times a
      frequency would not even be a whole number any more.
    * Any other Range from 0 (the mask's) -> a slice of one constant 0, 1, 2, ....

    Every slice ends at the length of the batch itself; a text longer than a table fails at the next Add, whose shapes
    then differ. A table that is not indexed by such a count (frozen at the export's length, clipped, ...) is not
    recognised, and the missing site stops the build.
    """

    name: str = "positions"
    about: str = "position tables sliced, relative positions looked up by distance, nothing computed per request"
    sites: tuple[str, ...] = ("positions",)

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the lookups and ranges replaced."""
        graph = model.graph
        done = sum(_slice_table(graph, node) for node in list(graph) if node.op_type == "Gather")
        done += sum(_look_up_distance(graph, node, context.max_length) for node in list(graph))
        done += sum(_slice_turns(graph, node, context.max_length) for node in list(graph))
        if done:
            # Their old index arithmetic hangs on ranges that are now unused.
            sweep(model)
        ranges = sum(_slice_numbers(graph, node, context.max_length) for node in list(graph) if node.op_type == "Range")
        if ranges:
            sweep(model)
        return done + ranges


def _slice_table(graph: ir.Graph, node: ir.Node) -> bool:
    """table[first + 0, first + 1, ...] -> Slice(table[first:], 0, L) and the broadcast row before it folded in."""
    table, index = constant(node.inputs[0]), node.inputs[1]
    count = counted(index)
    if table is None or table.ndim != 2 or count is None or attribute(node, "axis", 0) != 0:
        return False
    output = node.outputs[0]
    target, rows = _absorb_row(output, table[count.first :].copy())
    (value,) = _slice(graph, node, "positions.table", rows, count.length)
    value.type, value.shape = output.type, ir.Shape([_free(output), table.shape[1]])
    # [L, hidden] broadcasts against [b, L, hidden]; only another reader needs the first axis back.
    if rank(index) == 2 and any(usage.node.op_type != "Add" for usage in target.uses()):
        axes = add_constant(graph, "positions.axes", np.array([0], dtype=np.int64))
        (value,) = add_node(node, "Unsqueeze", [value, axes], name="positions.rows", like=output)
    if target is output:
        replace(output, value)
        return True
    # Add(Add(words, row), positions) -> Add(words, positions + row): the inner Add goes.
    total = next(usage.node for usage in output.uses())
    words = next(inner for inner, _ in operands(_inner_add(target)) if constant(inner) is None)
    total.replace_input_with(0, words)
    total.replace_input_with(1, value)
    return True


def _absorb_row(output: ir.Value, rows: Array) -> tuple[ir.Value, Array]:
    """The table with a constant row added, where one is added beside it; and the value whose readers change."""
    reader = only_use(output)
    if reader is None or reader.op_type != "Add":
        return output, rows
    for other, mine in operands(reader):
        inner = producer(other, "Add")
        if mine is not output or inner is None or len(other.uses()) != 1:
            continue
        for words, row in operands(inner):
            array = constant(row)
            if array is not None and array.size == array.shape[-1] == rows.shape[1] and constant(words) is None:
                return other, (rows.astype(np.float64) + array.reshape(-1)).astype(rows.dtype)
    return output, rows


def _inner_add(value: ir.Value) -> ir.Node:
    node = producer(value, "Add")
    if node is None:
        raise ValueError(f"{value.name} is made by no Add")
    return node


def _look_up_distance(graph: ir.Graph, node: ir.Node, max_length: int) -> bool:
    """The bias of relative positions -> Gather(by_distance [heads, 2 max_length - 1], key - query + max_length - 1)."""
    found = find_relative(node)
    if found is None:
        return False
    numbers = np.arange(max_length, dtype=np.int64)
    # The offset is in the query's numbers, so that the subtraction alone makes the index.
    (keys,) = _slice(graph, node, "positions.keys", numbers[None, :], found.length, axis=1)
    (queries,) = _slice(graph, node, "positions.queries", numbers[:, None] - (max_length - 1), found.length, axis=0)
    (distance,) = add_node(node, "Sub", [keys, queries], name="positions.distance")
    table = add_constant(graph, "positions.by_distance", found.by_distance(max_length))
    (bias,) = add_node(node, "Gather", [table, distance], name="positions.relative", attributes={"axis": 1})
    for value in (keys, queries, distance):
        value.type = ir.TensorType(ir.DataType.INT64)
    bias.type = found.output.type
    length = _free(found.output)
    bias.shape = ir.Shape([table.shape[0] if table.shape else None, length, length])
    replace(found.output, bias)
    return True


def _slice_turns(graph: ir.Graph, node: ir.Node, max_length: int) -> bool:
    """Cos or Sin of position * frequency -> Slice(table [1, max_length, width], 0, L) on axis 1."""
    found = find_turns(node)
    if found is None:
        return False
    (value,) = _slice(graph, node, "positions.turns", found.table(max_length), found.count.length, axis=1)
    value.type, value.shape = found.output.type, found.output.shape
    replace(found.output, value)
    return True


def _slice_numbers(graph: ir.Graph, node: ir.Node, max_length: int) -> bool:
    """Range(0, L) -> Slice(0 ... max_length - 1, 0, L)."""
    output = node.outputs[0]
    count = counted(output)
    if count is None or count.first != 0 or output.dtype is None:
        return False
    numbers = np.arange(max_length, dtype=output.dtype.numpy())
    (value,) = _slice(graph, node, "positions.numbers", numbers, count.length)
    value.type, value.shape = output.type, output.shape
    replace(output, value)
    return True


def _slice(
    graph: ir.Graph, before: ir.Node, name: str, rows: Array, length: ir.Value, axis: int = 0
) -> tuple[ir.Value, ...]:
    # A graph may have several counts (of two types) and several tables: their nodes get numbers.
    taken, number, wanted = {node.name for node in graph}, 1, name
    while name in taken:
        number += 1
        name = f"{wanted}.{number}"
    starts = add_constant(graph, f"{name}.start", np.array([0], dtype=np.int64))
    axes = add_constant(graph, f"{name}.axis", np.array([axis], dtype=np.int64))
    return add_node(before, "Slice", [add_constant(graph, f"{name}.rows", rows), starts, length, axes], name=name)


def _free(value: ir.Value) -> ir.SymbolicDim | int | None:
    """The size of the axis before the last, as the graph has it."""
    return None if value.shape is None or len(value.shape) < 2 else value.shape[-2]
