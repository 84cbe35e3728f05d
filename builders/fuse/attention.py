"""Step `attention`: the attention core as one ONNX operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from builders.errors import FuseError
from builders.fuse.clean import raise_opset, sweep
from builders.fuse.cores import Core, find_cores, layer_names
from builders.fuse.graph import add_constant, add_node, rank, replace, size
from builders.fuse.step import Context

#: `Attention` is an operator from here on.
ATTENTION_OPSET = 23


@dataclass(frozen=True)
class OneAttention:
    """MatMul, Add, Softmax, MatMul and the reshapes and transposes around them -> `Attention` (opset 23).

    In the 3-D form, [b, L, hidden] with q_num_heads and kv_num_heads: the operator splits and joins the heads, so
    that four transposes and four reshapes of each layer go as well. TensorRT's parser takes that form from 10.14 on
    (onnx-tensorrt, attentionHelpers.cpp) and makes it one IAttention with flash-style kernels; TensorRT-RTX too.

    The mask stays the additive one (-1e4): a boolean mask turns a row of nothing but padding into NaN. It is widened
    to [b, 1, L, L] once for all layers: the ONNX text lets it broadcast from [b, 1, 1, L], but ONNX Runtime 1.32 fails
    there ("inconsistent q_sequence_length") and TensorRT-RTX's operator page asks for the query axis too.

    Off by default for ONNX Runtime on CPU: 1.32 computes it rightly (tests/fuse) but no faster than the decomposed core
    (MiniLM, one thread: 8 x 128 264 against 265 ms, 1 x 512 155 against 161 ms), and older ones have no kernel for it.
    """

    name: str = "attention"
    about: str = "each attention core one Attention operator (opset 23)"
    sites: tuple[str, ...] = ("attention", "attention_operator")

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the cores replaced."""
        if not context.target.attention:
            raise FuseError(
                "the target does not take ONNX Attention",
                value=context.target.name,
                limit="TensorRT from 10.14 on, TensorRT-RTX, ONNX Runtime",
                remedy="leave the step `attention` out",
            )
        cores = find_cores(model.graph)
        masks: dict[tuple[ir.Value, ...], ir.Value] = {}
        work = [(core, name) for core, name in zip(cores, layer_names(cores), strict=True) if not core.single]
        if not work:
            return 0
        raise_opset(model, ATTENTION_OPSET)
        for core, name in work:
            _replace(model.graph, core, name, masks)
        sweep(model)
        return len(work)


def _replace(graph: ir.Graph, core: Core, name: str, masks: dict[tuple[ir.Value, ...], ir.Value]) -> None:
    inputs = [core.query, core.key, core.value]
    if core.biases:
        if core.biases not in masks:
            masks[core.biases] = _mask(graph, core)
        inputs.append(masks[core.biases])
    (output,) = add_node(
        core.operator,
        "Attention",
        inputs,
        name=name,
        like=core.output,
        attributes={"q_num_heads": core.heads, "kv_num_heads": core.heads, "scale": core.scale},
    )
    replace(core.output, output)


def _mask(graph: ir.Graph, core: Core) -> ir.Value:
    """All biases of a core as one FP32 [b or 1, heads or 1, L, L]."""
    total = core.biases[0]
    for bias in core.biases[1:]:
        (total,) = add_node(core.operator, "Add", [total, bias], name="attention.bias")
        total.type = bias.type
    wide = any(rank(bias) in (3, 4) and size(bias, -2) != 1 for bias in core.biases)
    if wide:
        return total
    (length,) = add_node(
        core.operator, "Shape", [core.query], name="attention.length", attributes={"start": 1, "end": 2}
    )
    ones = add_constant(graph, "attention.ones", np.array([1, 1], dtype=np.int64))
    one = add_constant(graph, "attention.one", np.array([1], dtype=np.int64))
    (shape,) = add_node(
        core.operator, "Concat", [ones, length, one], name="attention.mask.shape", attributes={"axis": 0}
    )
    (mask,) = add_node(core.operator, "Expand", [total, shape], name="attention.mask")
    mask.type = total.type
    return mask
