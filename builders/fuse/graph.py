"""Small reads and writes on an onnx_ir graph that the fusion steps share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray[Any, np.dtype[Any]]


def constant(value: ir.Value | None) -> Array | None:
    """The array behind an initializer or a Constant node, None for anything computed."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The one number of a constant of size 1, None for anything else."""
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def producer(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these operators of the standard domain."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain in ("", "ai.onnx") and node.op_type in operators else None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's plain value, a list of integers as a tuple."""
    found = node.attributes.get(name)
    if found is None:
        return default
    value: Any = found.value
    return tuple(value) if isinstance(value, (list, tuple)) else value


def operands(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Both orders of the two inputs of a commutative node."""
    first, second = node.inputs[0], node.inputs[1]
    if first is not None and second is not None:
        yield first, second
        yield second, first


def only_use(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value; None when there are more, or when it is an output of the graph."""
    readers = [usage.node for usage in value.uses()]
    return readers[0] if len(readers) == 1 and not value.is_graph_output() else None


def size(value: ir.Value, axis: int) -> int | None:
    """A known size of one axis, None where it is free or unknown."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    found = value.shape[axis]
    return found if isinstance(found, int) else None


def rank(value: ir.Value | None) -> int | None:
    """Number of axes, None where it is unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def add_constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """A new initializer; a taken name gets a number. Equal constants are merged by the step `clean`, not here."""
    name = free_name(graph, name)
    # A copy of its own in C order: a view would keep the whole array that it was cut from.
    tensor = ir.Tensor(np.array(array, order="C"), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def free_name(graph: ir.Graph, name: str) -> str:
    """The name itself, or with a number behind it when an initializer has it."""
    taken, number, wanted = graph.initializers, 1, name
    while name in taken:
        number += 1
        name = f"{wanted}.{number}"
    return name


def add_node(
    before: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    *,
    name: str,
    outputs: int = 1,
    like: ir.Value | None = None,
    attributes: dict[str, Any] | None = None,
) -> tuple[ir.Value, ...]:
    """Insert a node and return its outputs, named after it.

    Args:
        before: node in front of which it goes.
        operator: operator of the standard domain.
        inputs: values; None leaves an optional input out.
        name: name of the node.
        outputs: number of outputs.
        like: value whose type and shape the first output takes over.
        attributes: plain values.
    """
    graph = before.graph
    if graph is None:
        raise ValueError(f"the node {before.name} is in no graph")
    node = ir.node(operator, list(inputs), attributes or {}, num_outputs=outputs, name=name)
    for number, value in enumerate(node.outputs):
        value.name = name if outputs == 1 else f"{name}.{number}"
    if like is not None:
        node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    graph.insert_before(before, [node])
    return tuple(node.outputs)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old` read `new`; an output of the graph keeps its name."""
    if old.is_graph_output():
        name, old.name = old.name, f"{old.name}.replaced"
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def walk_back(values: Iterable[ir.Value | None], *, stop: frozenset[ir.Value] = frozenset()) -> Iterator[ir.Node]:
    """Every node that some value depends on, once each, nearest first; values in `stop` are not looked behind."""
    waiting = [value for value in values if value is not None]
    seen: set[ir.Node] = set()
    while waiting:
        value = waiting.pop()
        node = None if value in stop else value.producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(entry for entry in node.inputs if entry is not None)
