"""Outputs of the blocks by name: what parity is measured on, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from builders.errors import FuseError
from builders.fuse.graph import producer, rank


@dataclass(frozen=True)
class BlockOutput:
    """One place where two graphs of the same model can be compared."""

    name: str
    """`embeddings.norm`, `layer.N.attention.norm`, `layer.N.output.norm` or `pooled`."""
    value: str
    """Name of the value in this graph, [b, L, hidden]; `pooled`: the graph's output, [b, dim]."""


def block_outputs(model: ir.Model) -> list[BlockOutput]:
    """The outputs of all LayerNormalizations in the order in which they run, and the result.

    Post-norm encoders have one behind the embeddings and two in each block, so the order alone names them, in a fresh
    export and in a fused graph alike. ModernBERT's norms stand in front of what they belong to: the one before a
    feed-forward sees the attention's result, the next layer's first, or the last of all, the layer's.

    Raises:
        FuseError: the LayerNormalizations are not 2 per layer and 1.
    """
    values = [node.outputs[0] for node in _in_order(model.graph) if _is_block(node)]
    if len(values) % 2 == 0:
        raise FuseError(
            "the blocks of the graph cannot be named",
            value=f"{len(values)} LayerNormalization",
            limit="1 for the embeddings and 2 a layer",
            remedy="run the step `layer_norm` first",
        )
    names = ["embeddings.norm"]
    for layer in range(len(values) // 2):
        names += [f"layer.{layer}.attention.norm", f"layer.{layer}.output.norm"]
    found = [BlockOutput(name, str(value.name)) for name, value in zip(names, values, strict=True)]
    return [*found, BlockOutput("pooled", str(model.graph.outputs[0].name))]


def name_blocks(model: ir.Model) -> list[BlockOutput]:
    """Give the values, and the nodes that make them, the names of their blocks; outputs of the graph keep theirs."""
    blocks = block_outputs(model)
    wanted = {block.value: block.name for block in blocks[:-1]}
    for node in model.graph:
        value = node.outputs[0]
        if not _is_block(node) or value.name not in wanted:
            continue
        node.name = wanted[value.name]
        if not value.is_graph_output():
            value.name = node.name
    return block_outputs(model)


def _is_block(node: ir.Node) -> bool:
    """A LayerNormalization of token vectors; the head's own (ModernBERT's) follows an activation, never a sum."""
    if node.op_type != "LayerNormalization" or producer(node.inputs[0], "Gelu", "Relu", "Tanh") is not None:
        return False
    return rank(node.outputs[0]) in (3, None)


def _in_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes by depth of their dependencies: each LayerNormalization of these encoders depends on the one before."""
    depth: dict[ir.Node, int] = {}
    for node in graph:
        made = [value.producer() for value in node.inputs if value is not None]
        norm = node.op_type == "LayerNormalization"
        depth[node] = max((depth.get(maker, 0) for maker in made if maker is not None), default=0) + norm
    return sorted(graph, key=lambda node: depth[node])
