"""Relative position biases (MPNet, T5): the function of the distance that a graph computes, taken out of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.errors import FuseError
from builders.fuse.counting import counted
from builders.fuse.graph import Array, attribute, constant, only_use, producer, walk_back

#: Operators that treat each number of their input for itself: through them, equal distances stay equal.
_ELEMENTWISE = frozenset(
    {"Abs", "Add", "Cast", "Clip", "Div", "Expand", "Floor", "Greater", "GreaterOrEqual", "Identity", "Less"}
    | {"LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Sign", "Sub", "Where"}
)


@dataclass(frozen=True)
class Relative:
    """bias[head, query, key] = table[bucket(key - query), head], as a graph computes it."""

    distance: ir.Value
    """[L, L], key - query or query - key."""
    sign: int
    """1 where `distance` is key - query, -1 for the other way round."""
    bucket: ir.Value
    """[L, L], index into the table."""
    table: Array
    """[buckets, heads], FP32."""
    length: ir.Value
    """INT64 [1], L."""
    output: ir.Value
    """[1 or b, heads, L, L]: what the layers add to their scores."""

    def by_distance(self, max_length: int) -> Array:
        """The bias of every distance, [heads, 2 max_length - 1]; column i is key - query = i - (max_length - 1)."""
        distances = np.arange(-(max_length - 1), max_length, dtype=np.int64)
        buckets = evaluate(self.distance, self.bucket, (distances * self.sign)[None, :])
        return np.ascontiguousarray(self.table[buckets.reshape(-1)].T)


def find_relative(node: ir.Node) -> Relative | None:
    """The bias that ends in this Gather, None where it is another lookup.

    Recognised: Gather(table [buckets, heads], bucket [L, L]) -> Transpose (2, 0, 1) -> Unsqueeze -> Expand over the
    batch or not; the bucket depends on nothing but the difference of two counts.
    """
    table, bucket = (constant(node.inputs[0]), node.inputs[1]) if producer(node.outputs[0], "Gather") else (None, None)
    if table is None or table.ndim != 2 or bucket is None or attribute(node, "axis", 0) != 0:
        return None
    found = _distance(bucket)
    turned = only_use(node.outputs[0])
    if found is None or turned is None or turned.op_type != "Transpose" or attribute(turned, "perm") != (2, 0, 1):
        return None
    output = turned.outputs[0]
    while (reader := only_use(output)) is not None and reader.op_type in ("Unsqueeze", "Expand", "Identity"):
        output = reader.outputs[0]
    distance, sign, length = found
    return Relative(distance, sign, bucket, table, length, output)


def _distance(bucket: ir.Value) -> tuple[ir.Value, int, ir.Value] | None:
    """The difference of two counts that a bucket is an elementwise function of, and nothing else."""
    differences = [node for node in walk_back([bucket]) if node.op_type == "Sub" and _axes(node) is not None]
    if len(differences) != 1:
        return None
    value = differences[0].outputs[0]
    for node in walk_back([bucket], stop=frozenset([value])):
        # Shape and Expand fill a constant up to the index's shape (torch.full_like).
        if node.op_type not in _ELEMENTWISE and node.op_type not in ("Shape", "ConstantOfShape", "Constant"):
            return None
    sign = _axes(differences[0])
    count = counted(differences[0].inputs[0])
    return None if sign is None or count is None else (value, sign, count.length)


def _axes(node: ir.Node) -> int | None:
    """1 for [1, L] - [L, 1], which is key - query; -1 for the other way round; None for any other difference."""
    first, second = counted(node.inputs[0]), counted(node.inputs[1])
    if first is None or second is None or first.first != second.first or first.length is not second.length:
        return None
    signs: dict[tuple[int | None, int | None], int] = {(1, 0): 1, (0, 1): -1}
    return signs.get((_axis(node.inputs[0]), _axis(node.inputs[1])))


def _axis(value: ir.Value | None) -> int | None:
    """Which of two axes an unsqueezed count lies on."""
    shape = None if value is None else value.shape
    if shape is None or len(shape) != 2:
        return None
    ones = [axis for axis in (0, 1) if shape[axis] == 1]
    return 1 - ones[0] if len(ones) == 1 else None


def evaluate(start: ir.Value, end: ir.Value, numbers: Array) -> Array:
    """The value of `end` when `start` is `numbers`: the graph's own nodes, run by onnx's reference evaluator.

    Not rewritten in numpy: the exporter's order of operations decides on which side of a bucket's edge a rounded
    logarithm falls (distances 16, 32, 64).
    """
    from onnx.reference import ReferenceEvaluator

    wanted = set(walk_back([end], stop=frozenset([start])))
    graph = next(iter(wanted)).graph
    if graph is None:
        raise FuseError("the nodes of a relative position bias are in no graph")
    inputs = [value for node in wanted for value in node.inputs if value is not None]
    names = [value for value in dict.fromkeys(inputs) if constant(value) is not None]
    mapping: dict[ir.Value, ir.Value] = {start: ir.Value(name="start", type=start.type)}
    nodes = []
    for node in graph:
        if node not in wanted:
            continue
        copy = ir.node(
            node.op_type,
            [None if value is None else mapping.setdefault(value, _copy(value)) for value in node.inputs],
            attributes={name: entry.value for name, entry in node.attributes.items()},
            num_outputs=len(node.outputs),
        )
        for mine, theirs in zip(copy.outputs, node.outputs, strict=True):
            mine.name, mapping[theirs] = theirs.name, mine
        nodes.append(copy)
    inner = ir.Graph(
        [mapping[start]],
        [mapping[end]],
        nodes=nodes,
        initializers=[mapping[value] for value in names],
        opset_imports={"": graph.opset_imports.get("", 20)},
        name="bucket",
    )
    inner.outputs[0].type = end.type or ir.TensorType(ir.DataType.INT64)
    proto = ir.to_proto(ir.Model(inner, ir_version=10))
    # log(0) at distance 0, in the branch that is not taken there.
    with np.errstate(all="ignore"):
        (result,) = ReferenceEvaluator(proto).run(None, {"start": numbers})
    return np.asarray(result)


def _copy(value: ir.Value) -> ir.Value:
    tensor = ir.convenience.get_const_tensor(value)
    return ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=tensor)
