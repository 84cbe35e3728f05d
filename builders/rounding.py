"""A narrow graph for a machine that computes in FP32: every narrow tensor rounded, so that the gate sees what it costs.

ONNX Runtime on the CPU computes FP16 operators in FP32 and fuses chains of them, which hides overflow and most of the
rounding. Here all arithmetic is FP32 and a Cast to the narrow type and back follows each result. Where an operator
keeps intermediate results in the narrow type, they are written out and rounded too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from builders.errors import PrecisionError

if TYPE_CHECKING:
    import onnx_ir

_NARROW_TYPES = {10, 16}  # TensorProto.FLOAT16, BFLOAT16


def round_fp16_casts(model: onnx_ir.Model) -> onnx_ir.Model:
    """Rewrite a converted graph for the CPU accuracy gate; the argument stays as it is.

    Run the result with ONNX Runtime's graph optimisation off (`OnnxRunner(..., optimise=False)` of builders.verify),
    or it removes the pairs of Casts. BF16 is rounded in the same way.

    LayerNormalization is computed in FP32 and rounded once where `stash_type` is FP32, the rule of `convert`. With a
    narrow `stash_type`, mean, squares and variance are rounded one by one, so that squares above 65504 become
    infinite as they do on a device. ReduceL2, ReduceSumSquare and ReduceMean in a narrow type likewise.

    Args:
        model: a graph of `builders.precision.convert`.

    Returns:
        A graph with the same inputs and outputs, node and value names.
    """
    import onnx_ir as ir

    copy = model.clone()
    for value in copy.graph.initializers.values():
        if value.const_value is not None and value.dtype in _NARROW_TYPES:
            array = value.const_value.numpy().astype(np.float32)
            value.const_value = ir.tensor(array, name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(copy.graph):
        output = node.outputs[0]
        if output.dtype in _NARROW_TYPES:
            _Rounding(copy.graph, output.dtype).rewrite(node)
    return copy


class _Rounding:
    """Rewrites the nodes of one narrow type."""

    def __init__(self, graph: onnx_ir.Graph, narrow: onnx_ir.DataType):
        self.graph, self.narrow = graph, narrow

    def rewrite(self, node: onnx_ir.Node) -> None:
        """Compute a node's result in FP32 and round it."""
        import onnx_ir as ir

        output = node.outputs[0]
        steps = self._steps(node)
        if steps is not None:
            ir.convenience.replace_all_uses_with(output, steps, replace_graph_outputs=True)
            name, output.name = output.name, f"{output.name}_unused"
            steps.name = name
            self.graph.remove(node)
            return
        for output in [value for value in node.outputs if value.dtype == self.narrow]:  # a Split has several
            self._round(output, node)

    def _round(self, output: onnx_ir.Value, node: onnx_ir.Node) -> None:
        import onnx_ir as ir

        if node.op_type == "Cast":  # rounds by itself
            narrow_end, last = output, node
        else:
            output.type = ir.TensorType(ir.DataType.FLOAT)
            narrow_end = self._node("Cast", [output], node, {"to": int(self.narrow)}, dtype=self.narrow)
            last = self._made
        uses = [use for use in output.uses() if use.node is not last]
        rounded = self._node("Cast", [narrow_end], last, {"to": int(ir.DataType.FLOAT)})
        for use in uses:
            use.node.replace_input_with(use.idx, rounded)
        # The consumers' name for it is what the gate asks for.
        name, output.name = output.name, f"{output.name}_exact"
        rounded.name = name

    def _steps(self, node: onnx_ir.Node) -> onnx_ir.Value | None:
        """The rounded steps of an operator that keeps intermediate results in the narrow type, else None."""
        inputs = [value for value in node.inputs if value is not None]
        self._made = node
        stash = node.attributes.get("stash_type")
        if node.op_type == "LayerNormalization" and stash is not None and stash.as_int() in _NARROW_TYPES:
            return self._layer_norm(node, inputs)
        if node.op_type in ("ReduceL2", "ReduceSumSquare"):
            squares = self._rounded("Mul", [inputs[0], inputs[0]], node)
            total = self._rounded("ReduceSum", [squares, *inputs[1:]], node, _keep(node))
            return self._rounded("Sqrt", [total], node) if node.op_type == "ReduceL2" else total
        return None

    def _layer_norm(self, node: onnx_ir.Node, inputs: Sequence[onnx_ir.Value]) -> onnx_ir.Value:
        axis, epsilon = node.attributes.get("axis"), node.attributes.get("epsilon")
        if axis is not None and axis.as_int() != -1:
            raise PrecisionError(
                "LayerNormalization over several axes", value=node.name, limit="axis -1", remedy="set stash_type to 1"
            )
        axes = self._constant(np.array([-1], np.int64), f"{node.outputs[0].name}_axes")
        small = np.array(1e-5 if epsilon is None else epsilon.as_float(), np.float32)
        mean = self._mean(inputs[0], axes, node)
        centred = self._rounded("Sub", [inputs[0], mean], node)
        variance = self._mean(self._rounded("Mul", [centred, centred], node), axes, node)
        shifted = self._rounded("Add", [variance, self._constant(small, f"{node.outputs[0].name}_epsilon")], node)
        normal = self._rounded("Div", [centred, self._rounded("Sqrt", [shifted], node)], node)
        scaled = self._rounded("Mul", [normal, inputs[1]], node)
        return self._rounded("Add", [scaled, inputs[2]], node) if len(inputs) > 2 else scaled

    def _mean(self, value: onnx_ir.Value, axes: onnx_ir.Value, node: onnx_ir.Node) -> onnx_ir.Value:
        return self._rounded("ReduceMean", [value, axes], node, {"keepdims": 1})

    def _rounded(
        self, op: str, inputs: Sequence[onnx_ir.Value], node: onnx_ir.Node, attributes: Mapping[str, Any] | None = None
    ) -> onnx_ir.Value:
        """Insert an operator and its rounding behind what was inserted last."""
        exact = self._node(op, inputs, self._made, attributes)
        narrow = self._node("Cast", [exact], self._made, {"to": int(self.narrow)}, dtype=self.narrow)
        return self._node("Cast", [narrow], self._made, {"to": 1})

    def _node(
        self,
        op: str,
        inputs: Sequence[onnx_ir.Value],
        after: onnx_ir.Node,
        attributes: Mapping[str, Any] | None = None,
        dtype: onnx_ir.DataType | None = None,
    ) -> onnx_ir.Value:
        import onnx_ir as ir

        node = ir.node(op, inputs, attributes or {})
        self.graph.insert_after(after, node)
        node.outputs[0].type = ir.TensorType(dtype or ir.DataType.FLOAT)
        node.metadata_props.update(after.metadata_props)
        self._made = node
        return node.outputs[0]

    def _constant(self, array: np.ndarray[Any, Any], name: str) -> onnx_ir.Value:
        import onnx_ir as ir

        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        value.shape = ir.Shape(array.shape)
        value.const_value = ir.tensor(array, name=name)
        self.graph.register_initializer(value)
        return value


def _keep(node: onnx_ir.Node) -> dict[str, int]:
    names = ("keepdims", "noop_with_empty_axes")
    return {name: node.attributes[name].as_int() for name in names if name in node.attributes}
