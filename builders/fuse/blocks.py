"""Outputs of the blocks by name: what parity is measured on, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from builders.errors import FuseError


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
    export and in a fused graph alike.

    Raises:
        FuseError: the LayerNormalizations are not 2 per layer and 1.
    """
    values = [node.outputs[0] for node in _in_order(model.graph) if node.op_type == "LayerNormalization"]
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
        if node.op_type != "LayerNormalization" or value.name not in wanted:
            continue
        node.name = wanted[value.name]
        if not value.is_graph_output():
            value.name = node.name
    return block_outputs(model)


def _in_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes by depth of their dependencies: each LayerNormalization of these encoders depends on the one before."""
    depth: dict[ir.Node, int] = {}
    for node in graph:
        made = [value.producer() for value in node.inputs if value is not None]
        norm = node.op_type == "LayerNormalization"
        depth[node] = max((depth.get(maker, 0) for maker in made if maker is not None), default=0) + norm
    return sorted(graph, key=lambda node: depth[node])
