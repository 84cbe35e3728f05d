"""Graph edits: the faults that the gate must catch, and small stand-ins for the steps of a build."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir

from builders.verify.runner import Floats, OnnxRunner

OUTLIER = 500.0
Edit = Callable[[onnx_ir.Model], None]


def norms(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    return [node for node in model.graph if node.op_type == "LayerNormalization"]


def blocks_of(model: onnx_ir.Model) -> dict[str, str]:
    """Names as `builders.fuse.blocks` gives them, for a graph whose LayerNormalization nodes are whole."""
    names = ["embeddings.norm"]
    names += [f"layer.{i // 2}.{('attention', 'output')[i % 2]}.norm" for i in range(len(norms(model)) - 1)]
    return dict(zip(names, (str(node.outputs[0].name) for node in norms(model)), strict=True))


def edited(model: onnx_ir.Model, *edits: Edit) -> onnx_ir.Model:
    copy = model.clone()
    for edit in edits:
        edit(copy)
    return copy


def runner(model: onnx_ir.Model, blocks: dict[str, str], *, optimise: bool = False) -> OnnxRunner:
    return OnnxRunner(model, blocks, optimise=optimise, threads=2)


def array_of(value: onnx_ir.Value | None) -> Floats:
    assert value is not None
    assert value.const_value is not None
    return value.const_value.numpy()


def set_array(value: onnx_ir.Value | None, array: Floats) -> None:
    assert value is not None
    value.const_value = onnx_ir.tensor(array.astype(np.float32), name=value.name)


def qkv(model: onnx_ir.Model, layer: int) -> list[onnx_ir.Node]:
    """The three products of a layer's attention, Q, K, V in this order."""
    entry = norms(model)[2 * layer].outputs[0]
    return [node for node in model.graph if node.op_type == "MatMul" and node.inputs[0] is entry][:3]


def swap_q_and_k(model: onnx_ir.Model, layer: int = 1) -> None:
    q, k, _ = qkv(model, layer)
    for a, b in ((q, k), (next(iter(q.outputs[0].consumers())), next(iter(k.outputs[0].consumers())))):
        mine, other = a.inputs[1], b.inputs[1]
        a.replace_input_with(1, other)
        b.replace_input_with(1, mine)


def widen_mask(model: onnx_ir.Model) -> None:
    """-1e4 becomes -3.4e38, the lowest FP32 number."""
    values = {value for node in model.graph for value in node.inputs if value is not None and value.const_value}
    masks = [value for value in values if value.const_value.size == 1 and array_of(value).item() == -1e4]
    assert masks
    for value in masks:
        set_array(value, np.full(array_of(value).shape, np.finfo(np.float32).min))


def freeze_positions(model: onnx_ir.Model, length: int = 16) -> None:
    """Every position past the length the graph was exported at takes the last row of that length."""
    gather = next(n for n in model.graph if n.op_type == "Gather" and "position" in str(n.inputs[0].name))
    last = onnx_ir.Value(name="frozen", type=onnx_ir.TensorType(onnx_ir.DataType.INT32), shape=onnx_ir.Shape([]))
    last.const_value = onnx_ir.tensor(np.array(length - 1, np.int32), name="frozen")
    model.graph.register_initializer(last)
    least = onnx_ir.node("Min", [gather.inputs[1], last])
    model.graph.insert_before(gather, least)
    gather.replace_input_with(1, least.outputs[0])


def raise_channel(model: onnx_ir.Model) -> None:
    """One channel of the residual stream × 500, taken back where the products read it: an outlier channel."""
    norm = norms(model)[0]
    for place in (1, 2):
        raised = array_of(norm.inputs[place]).copy()
        raised[7] *= OUTLIER
        set_array(norm.inputs[place], raised)
    for product in qkv(model, 0):
        weight = array_of(product.inputs[1]).copy()
        weight[7] /= OUTLIER
        set_array(product.inputs[1], weight)


def narrow_layer_norm(model: onnx_ir.Model, place: int = 1) -> None:
    """One LayerNormalization in FP16 arithmetic: every intermediate result is rounded."""
    node = norms(model)[place]
    value, weight, bias = node.inputs
    axes = onnx_ir.Value(name="axes", type=onnx_ir.TensorType(onnx_ir.DataType.INT64), shape=onnx_ir.Shape([1]))
    axes.const_value = onnx_ir.tensor(np.array([-1], np.int64), name="axes")
    model.graph.register_initializer(axes)

    def step(op: str, *inputs: onnx_ir.Value | None) -> onnx_ir.Value:
        exact = onnx_ir.node(op, inputs)
        narrow = onnx_ir.node("Cast", exact.outputs, {"to": 10})
        wide = onnx_ir.node("Cast", narrow.outputs, {"to": 1})
        model.graph.insert_before(node, [exact, narrow, wide])
        wide.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        return wide.outputs[0]

    centred = step("Sub", value, step("ReduceMean", value, axes))
    deviation = step("Sqrt", step("ReduceMean", step("Mul", centred, centred), axes))
    result = step("Add", step("Mul", step("Div", centred, deviation), weight), bias)
    old, name = node.outputs[0], node.outputs[0].name
    onnx_ir.convenience.replace_all_uses_with(old, result)
    model.graph.remove(node, safe=True)
    old.name, result.name = "unused", name


def round_fp16(model: onnx_ir.Model) -> None:
    """Stand-in for builders.rounding: each FP32 result and constant through FP16, LayerNorm statistics kept FP32."""
    for value in list(model.graph.initializers.values()):
        if value.const_value is not None and value.dtype == onnx_ir.DataType.FLOAT:
            with np.errstate(over="ignore"):
                set_array(value, array_of(value).astype(np.float16).astype(np.float32))
    for node in list(model.graph):
        output = node.outputs[0]
        if output.dtype != onnx_ir.DataType.FLOAT or output.is_graph_output():
            continue
        narrow = onnx_ir.node("Cast", [output], {"to": 10})
        wide = onnx_ir.node("Cast", narrow.outputs, {"to": 1})
        wide.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        model.graph.insert_after(node, [narrow, wide])
        for use in [use for use in output.uses() if use.node is not narrow]:
            use.node.replace_input_with(use.idx, wide.outputs[0])
        wide.outputs[0].name, output.name = output.name, f"{output.name}.exact"


def remake_scale(model: onnx_ir.Model) -> None:
    """A harmless step: the attention scale moves from the scores into the query's product."""
    for node in [node for node in model.graph if node.op_type == "Mul" and _is_scores(node)]:
        product, scale = node.inputs
        assert product is not None
        matmul = product.producer()
        assert matmul is not None
        scaled = onnx_ir.node("Mul", [matmul.inputs[0], scale])
        scaled.outputs[0].type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
        model.graph.insert_before(matmul, scaled)
        matmul.replace_input_with(0, scaled.outputs[0])
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], product)
        model.graph.remove(node, safe=True)


def _is_scores(node: onnx_ir.Node) -> bool:
    consumers = [use.node for use in node.outputs[0].uses()]
    return any(use.node.op_type == "Softmax" for consumer in consumers for use in consumer.outputs[0].uses())


def apply(model: onnx_ir.Model, steps: Sequence[str], known: dict[str, Edit]) -> onnx_ir.Model:
    return edited(model, *(known[name] for name in steps))
