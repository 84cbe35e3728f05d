"""Step `scale_mask`: no scaling of the scores is left, and the mask is the one thing added to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.fuse.clean import sweep
from builders.fuse.cores import Core, find_cores, layer_names, merged, projection
from builders.fuse.graph import add_constant, add_node, constant, only_use, operands, replace, size
from builders.fuse.step import Context


@dataclass(frozen=True)
class ScaleMask:
    """softmax(scale * Q K^T + mask) -> softmax(Q' K^T + mask), the scale inside the constants that make Q'.

    Why there: it costs no node at all, where a scale on the scores is a pass over [b, heads, L, L] and one on Q a pass
    over [b, L, hidden]. The factor is applied in float64 and rounded once, so each weight is off by half a unit in the
    last place at most (6e-8), and by nothing where the scale is a power of two (width 64: 1/8). An `Attention`
    operator then carries scale = 1.

    In FP16 this is also the safer place: Q K^T is the first value of the layer that can leave the range (65504), and
    scaled before the product it is 1/scale (5.7 to 11 times) further from it; Q' itself only becomes smaller, its
    smallest normal value 6e-5 being far below any weight that matters. The mask is added as it is: -1e4 stays far
    below any score, which would not hold for a mask that had been scaled with them.

    Biases beside the mask (MPNet's relative positions) are the same in all layers: for targets with `one_bias` they are
    added up once, so that each layer has one Add, or its `Attention` operator one attn_mask.
    """

    name: str = "scale_mask"
    about: str = "the attention scale folded into the constants of Q; scores get one added mask"
    sites: tuple[str, ...] = ("scale_mask", "attention")

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the attentions changed."""
        cores = find_cores(model.graph)
        names = layer_names(cores)
        changed = {name for core, name in zip(cores, names, strict=True) if _fold_scale(model.graph, core, name)}
        if context.target.one_bias:
            sums: dict[tuple[ir.Value, ...], ir.Value] = {}
            changed |= {
                name
                for core, name in zip(find_cores(model.graph), names, strict=True)
                if core.operator.op_type == "Softmax" and _join_biases(core, sums)
            }
        if changed:
            sweep(model)
        return len(changed)


def _fold_scale(graph: ir.Graph, core: Core, name: str) -> bool:
    if core.scale == 1.0 and not core.factors:
        return False
    if not _scale_query(graph, core, name):
        return False
    for node in core.factors:
        inner = next(
            value for value in node.inputs if value is not None and (node.op_type == "Div" or constant(value) is None)
        )
        replace(node.outputs[0], inner)
    if core.operator.op_type == "Attention":
        core.operator.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
    return True


def _scale_query(graph: ir.Graph, core: Core, name: str) -> bool:
    """Scale the constants that make Q; refused where something else reads Q as well."""
    joint = merged(core)
    part = joint[1] if joint else projection(core.query)
    if part is None or only_use(core.query) is None:
        return False
    end = None
    if joint:
        sizes = constant(joint[0].inputs[1]) if len(joint[0].inputs) > 1 else None
        weight = constant(part.weight)
        if weight is None:
            return False
        end = int(sizes[0]) if sizes is not None else weight.shape[1] // 3
    elif only_use(part.output) is None:
        return False
    # New constants, not changed ones: equal initializers are shared (the zero biases of an untrained model are one).
    suffix = "qkv" if joint else "query"
    product, bias_node = part.nodes[-1], part.nodes[0]
    for node, value, kind in ((product, part.weight, "weight"), (bias_node, part.bias, "bias")):
        array = constant(value)
        if value is None or array is None:
            continue
        scaled = array.astype(np.float64)
        scaled[..., :end] *= core.scale
        constant_value = add_constant(graph, f"{name}.{suffix}.{kind}.scaled", scaled.astype(array.dtype))
        node.replace_input_with(list(node.inputs).index(value), constant_value)
    return True


def _join_biases(core: Core, sums: dict[tuple[ir.Value, ...], ir.Value]) -> bool:
    """Replace several added biases by one sum, made in front of the first layer that needs it."""
    if len(core.biases) < 2:
        return False
    last = _add_of(core.operator.inputs[0])
    if core.biases not in sums:
        total = core.biases[0]
        for bias in core.biases[1:]:
            (total,) = add_node(last, "Add", [total, bias], name="attention.bias")
            total.type = core.biases[0].type
        # As wide as the scores once one of them is: relative positions differ by query, the mask does not.
        if any(size(bias, -2) != 1 for bias in core.biases):
            total.shape = last.outputs[0].shape
        sums[core.biases] = total
    inner = core.operator.inputs[0]
    for _ in core.biases:
        node = _add_of(inner)
        inner = next(value for value, bias in operands(node) if bias in core.biases)
    last.replace_input_with(0, inner)
    last.replace_input_with(1, sums[core.biases])
    return True


def _add_of(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Add":
        raise ValueError(f"{value} is made by no Add")
    return node
