"""What a graph holds: fused sites by kind, and which unfused pattern stands where one is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from builders.fuse.cores import Core, find_cores, merged
from builders.fuse.counting import counted
from builders.fuse.graph import constant, operands, producer, rank
from builders.fuse.qkv import separate


@dataclass(frozen=True)
class Found:
    """Sites in a graph."""

    sites: dict[str, int]
    """Fused sites by kind, the keys of `table.Sites`."""
    instead: dict[str, str]
    """By kind, the pattern that was found where a site may be missing; empty text where there is none."""


def count_sites(model: ir.Model) -> Found:
    """Count by structure, not by name: the same for a fresh export, a half-fused graph and any exporter's file."""
    graph = model.graph
    operators = Counter(node.op_type for node in graph if node.domain in ("", "ai.onnx"))
    cores = find_cores(graph)
    single = sum(core.single for core in cores)
    folded = sum(core.scale == 1.0 and not core.factors for core in cores)
    learned, relative, rotary = _tables(graph), _distances(graph), _turns(graph)
    joint = sum(merged(core) is not None for core in cores)
    return Found(
        sites={
            "qkv": joint,
            "attention": len(cores),
            "attention_operator": single,
            "scale_mask": folded,
            "gelu": _on_tokens(graph, "Gelu"),
            "layer_norm": _on_tokens(graph, "LayerNormalization"),
            "positions": learned + relative + rotary,
        },
        instead={
            "qkv": _products(cores, joint),
            "attention": _softmaxes(operators, cores),
            "attention_operator": f"{len(cores) - single} cores of MatMul, Softmax, MatMul",
            "scale_mask": f"{len(cores) - folded} cores with a scale beside the constants of Q",
            "gelu": _listed(operators, "Erf", "Tanh", "Sigmoid", "Relu"),
            "layer_norm": _listed(operators, "ReduceMean", "RMSNormalization", "SimplifiedLayerNormalization"),
            "positions": _positions(operators, learned, relative, rotary) + _unsliced(graph),
        },
    )


def _on_tokens(graph: ir.Graph, operator: str) -> int:
    """Operators on [b, L, width]; a head's own on [b, width], and a norm of a table, are no part of the layers."""
    return sum(node.op_type == operator and rank(node.outputs[0]) in (3, None) for node in graph)


def _turns(graph: ir.Graph) -> int:
    """Constant tables [1, positions, width] cut at the batch's length: cosines and sines of rotary positions."""
    found = 0
    for node in graph:
        array = constant(node.inputs[0]) if node.op_type == "Slice" else None
        found += array is not None and array.ndim == 3 and array.dtype.kind != "i" and _length(node)
    return found


def _positions(operators: Counter[str], learned: int, relative: int, rotary: int) -> str:
    computed = _listed(operators, "Cos", "Sin")
    turned = f", {rotary} sliced turns" if rotary else ""
    more = "" if computed == "nothing of the kind" else f"; computed per request: {computed}"
    return f"{learned} sliced tables, {relative} tables by distance{turned}{more}"


def _products(cores: list[Core], joint: int) -> str:
    parts = sum(separate(core) is not None for core in cores)
    others = len(cores) - joint - parts
    odd = f"; {others} cores whose Q, K and V are no such products of one input" if others else ""
    return f"{3 * parts} separate Q/K/V MatMuls, {joint} merged{odd}"


def _softmaxes(operators: Counter[str], cores: list[Core]) -> str:
    """Every Softmax and Attention operator is a core, or of a form that the matcher does not know."""
    other = _listed(operators, "Softmax", "Attention", "Einsum", "MultiHeadAttention")
    return f"{len(cores)} recognised cores; in the graph: {other}"


def _listed(operators: Counter[str], *names: str) -> str:
    return ", ".join(f"{operators[name]} {name}" for name in names if operators[name]) or "nothing of the kind"


def _tables(graph: ir.Graph) -> int:
    """Constant tables [positions, hidden] cut at the batch's length, on their way into the first LayerNormalization."""
    return sum(
        node.op_type == "Slice" and _is_table(node.inputs[0]) and _length(node) for node in _before_first_norm(graph)
    )


def _is_table(value: ir.Value | None) -> bool:
    """[positions, hidden]; a count, [1, n] or [n, 1], is none."""
    array = constant(value)
    return array is not None and array.ndim == 2 and 1 not in array.shape


def _length(node: ir.Node) -> bool:
    """The end of the slice is the length of the batch: a constant end is a table frozen at the export's length."""
    from builders.fuse.counting import length_of

    return len(node.inputs) > 2 and length_of(node.inputs[2]) is not None


def _distances(graph: ir.Graph) -> int:
    """Gather(by_distance [heads, distances], difference of two sliced counts)."""
    found = 0
    for node in graph:
        difference = producer(node.inputs[1], "Sub") if node.op_type == "Gather" else None
        if difference is None or not _is_table(node.inputs[0]):
            continue
        found += all(producer(value, "Slice") and counted(value) for value in difference.inputs)
    return found


def _unsliced(graph: ir.Graph) -> str:
    """What stands where a sliced table was expected, as text behind the numbers."""
    parts = []
    for node in _before_first_norm(graph):
        if node.op_type == "Gather" and _is_table(node.inputs[0]) and counted(node.inputs[1]) is not None:
            parts.append("a table looked up by computed positions")
        for value in node.inputs if node.op_type == "Add" else ():
            array = constant(value)
            if array is not None and array.ndim >= 2 and array.shape[-2] > 1:
                parts.append(f"positions frozen at {array.shape[-2]} tokens")
        if node.op_type == "Slice" and _is_table(node.inputs[0]) and not _length(node):
            parts.append("a table cut at a constant length")
    return "".join(f"; {part}" for part in dict.fromkeys(parts))


def _before_first_norm(graph: ir.Graph) -> list[ir.Node]:
    """The nodes between the embedding lookups and the first LayerNormalization."""
    first = next((node for node in graph if node.op_type == "LayerNormalization"), None)
    waiting, found = [first.inputs[0]] if first else [], []
    while waiting:
        node = producer(waiting.pop(), "Add", "Gather", "Slice", "Unsqueeze", "Identity", "Cast")
        if node is None:
            continue
        found.append(node)
        if node.op_type == "Add":
            waiting.extend(value for value, _ in operands(node))
        elif node.op_type not in ("Gather", "Slice"):
            waiting.append(node.inputs[0])
    return found
