"""Arithmetic as explicit types in the graph: weights and activations in FP16 or BF16, what needs range in FP32.

A strongly typed TensorRT network (the only kind from TensorRT 11 on) takes each tensor's type from the graph, so the
precision of a plan is decided here and nowhere else. What stays FP32, and how it is said:

* LayerNormalization: `stash_type = 1`, the type its definition computes mean and variance in, and no Casts around it.
  A weakly typed TensorRT (8.6) takes it over into `INormalizationLayer.compute_precision`; a strongly typed one
  ignores it (onnx-tensorrt, importer of LayerNormalization) and computes in FP32 always: the plan of TensorRT-RTX 1.7
  has `AddAddCastMeanSubMulMeanAddSqrtDivMulCastMulAdd` for a residual add and its norm, the same for `stash_type` 10.
  Casts around the operator would carry the residual stream through memory in FP32.
* Softmax: Casts on both sides, or `softmax_precision = 1` where it is a part of an `Attention` operator.
* sums, norms and what follows them up to the next product: Casts in front. A sum over 2048 tokens leaves FP16's
  range or loses its digits.
* the output, whatever computes it.

Token numbers, lengths and shapes keep their integer types.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from builders.errors import PrecisionError

if TYPE_CHECKING:
    import onnx_ir

    from builders.int8 import Int8Product

Precision = Literal["fp32", "fp16", "bf16", "int8"]
Array = np.ndarray[Any, np.dtype[np.float32]]

# The narrow type goes in and out of these: products, whose kernels add up in FP32 by themselves, and what fuses with
# them. The operators of encoders only; anything else follows its inputs.
_NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization"})
_NARROW = _NORMALIZATIONS | {"MatMul", "Gemm", "Conv", "Attention", "Gelu"}
_WIDE = frozenset({
    "Softmax", "LogSoftmax", "LpNormalization", "CumSum",
    "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd", "ReduceLogSumExp",
})  # fmt: skip
# As in builders/finite.py: exp() of it is 0 beside any score, and FP16 (largest value 65504) still holds it.
_MASKED = -1e4
_LARGEST = {"FLOAT": 3.4028234e38, "FLOAT16": 65504.0, "BFLOAT16": 3.3895e38}
_FLOAT = 1  # TensorProto.FLOAT


@dataclass(frozen=True)
class PrecisionReport:
    """What a graph computes in which type; the same for a graph that was converted twice."""

    precision: Precision
    """The narrow type."""
    narrow: dict[str, int]
    """Nodes with a result in the narrow type, by operator, most frequent first."""
    wide: dict[str, int]
    """Nodes with a result in FP32, by operator, most frequent first; Casts are not counted."""
    casts: int
    """Casts between the two types."""
    clamped: tuple[str, ...]
    """Mask constants outside the type's range that this call replaced by -1e4; empty where the mask was finite."""
    weight_bytes: int
    """Size of all floating-point constants."""
    products: tuple[Int8Product, ...] = ()
    """Of int8 alone: what was chosen for each product."""


def convert(model: onnx_ir.Model, precision: Precision) -> PrecisionReport:
    """Give every tensor of a graph its type, in place. Converting a second time changes nothing.

    Args:
        model: a graph in FP32, or one that was converted to the same precision. Standard operators, no subgraphs.
        precision: `fp32` only checks that nothing is narrower.

    Returns:
        What is computed in which type.

    Raises:
        PrecisionError: the graph holds another narrow type, a subgraph, or a weight outside the type's range.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

    if precision not in ("fp32", "fp16", "bf16"):
        raise PrecisionError(
            "no type of a whole graph",
            value=precision,
            limit="fp32, fp16 or bf16",
            remedy="use builders.int8 for the CPU engine, builders.quantize for fp8 and int8 on a GPU",
        )
    narrow = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[precision]
    _check(model, narrow)
    if narrow == ir.DataType.FLOAT:
        return _report(model, precision, ())
    LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(model)
    conversion = _Conversion(model.graph, narrow)
    # A list: nodes are inserted on the way. ONNX guarantees the order: producers stand before consumers.
    for node in list(model.graph):
        conversion.convert_node(node)
    conversion.widen_outputs()
    RemoveUnusedNodesPass()(model)
    return _report(model, precision, tuple(conversion.clamped))


class _Conversion:
    """One pass over a graph. `casts` and `constants` keep what was already made, so that each is made once."""

    def __init__(self, graph: onnx_ir.Graph, narrow: onnx_ir.DataType):
        import onnx_ir as ir

        self.graph, self.narrow, self.wide = graph, narrow, ir.DataType.FLOAT
        self.casts: dict[tuple[onnx_ir.Value, onnx_ir.DataType], onnx_ir.Value] = {}
        self.constants: dict[tuple[onnx_ir.Value, onnx_ir.DataType], onnx_ir.Value] = {}
        self.clamped: list[str] = []

    def convert_node(self, node: onnx_ir.Node) -> None:
        """Give a node's floating-point inputs and its result one type."""
        import onnx_ir as ir

        if node.op_type == "Cast":  # says its type itself; a Cast to FP32 in the source asks for FP32
            return
        target = self.wide if self._is_wide(node) else self.narrow
        for place, value in enumerate(node.inputs):
            if value is not None and self._is_float(value) and value.dtype != target:
                made = self._constant(value, target, node) if value.const_value else self._cast(value, target, node)
                node.replace_input_with(place, made)
        if node.op_type in _NORMALIZATIONS:
            node.attributes.add(_int_attribute("stash_type", _FLOAT))
        elif node.op_type == "Attention":
            node.attributes.add(_int_attribute("softmax_precision", _FLOAT))
        # Mean and deviation, a norm's further results, are in its `stash_type`; parts of a Split are like the whole.
        for output in node.outputs[:1] if node.op_type in _NORMALIZATIONS else node.outputs:
            if self._is_float(output):
                # A new type, not `.dtype =`: a clone of the model shares the old one.
                output.type = ir.TensorType(target)

    def widen_outputs(self) -> None:
        """Put a Cast behind each output of the graph that came out narrow; it takes over the output's name."""
        for place, value in enumerate(self.graph.outputs):
            node = value.producer()
            if value.dtype != self.narrow or node is None:
                continue
            name, value.name = value.name, f"{value.name}_narrow"
            widened = self._cast(value, self.wide, None)
            widened.name = name
            self.graph.outputs[place] = widened

    def _is_wide(self, node: onnx_ir.Node) -> bool:
        """Sums and norms are FP32, products are narrow; the rest stays FP32 where one of its inputs already is."""
        if node.op_type in _WIDE:
            return True
        if node.op_type in _NARROW:
            return False
        inputs = [value for value in node.inputs if value is not None and value.const_value is None]
        return any(value.dtype == self.wide for value in inputs)

    def _is_float(self, value: onnx_ir.Value) -> bool:
        return value.dtype in (self.wide, self.narrow)

    def _cast(self, value: onnx_ir.Value, target: onnx_ir.DataType, before: onnx_ir.Node | None) -> onnx_ir.Value:
        import onnx_ir as ir

        if (made := self.casts.get((value, target))) is not None:
            return made
        producer = value.producer()
        if producer is not None and producer.op_type == "Cast":
            source = producer.inputs[0]
            if source is not None and source.dtype == target:  # back to where it came from
                return source
        node = ir.node("Cast", [value], {"to": int(target)}, name=f"{value.name}_to_{target.name.lower()}")
        node.outputs[0].name, node.outputs[0].shape = node.name, value.shape
        node.outputs[0].type = ir.TensorType(target)
        if producer is not None:
            node.metadata_props.update(producer.metadata_props)
            self.graph.insert_after(producer, node)
        elif before is not None:
            self.graph.insert_before(before, node)
        self.casts[value, target] = node.outputs[0]
        return node.outputs[0]

    def _constant(self, value: onnx_ir.Value, target: onnx_ir.DataType, node: onnx_ir.Node) -> onnx_ir.Value:
        import onnx_ir as ir

        if (made := self.constants.get((value, target))) is not None:
            return made
        wide = _array(value)
        with np.errstate(over="ignore"):
            array = wide.astype(target.numpy())
        if not np.isfinite(array.astype(np.float32)).all():
            array = self._in_range(value, wide, target, node).astype(target.numpy())
        name = f"{value.name}_{target.name.lower()}"
        made = ir.Value(name=name, shape=value.shape, type=ir.TensorType(target))
        made.const_value = ir.tensor(array, dtype=target, name=name)
        self.graph.register_initializer(made)
        self.constants[value, target] = made
        return made

    def _in_range(self, value: onnx_ir.Value, array: Array, target: onnx_ir.DataType, node: onnx_ir.Node) -> Array:
        if array.size == 1 and not np.isnan(array).any():
            if node.op_type in ("Clip", "Min", "Max"):  # a bound that nothing reaches
                limit = _LARGEST[target.name]
                return np.clip(array, -limit, limit)
            if array.item() < 0:
                self.clamped.append(str(value.name))
                return np.full_like(array, _MASKED)
        worst = float(array.flat[int(np.argmax(np.abs(np.nan_to_num(array, nan=np.inf))))])
        raise PrecisionError(
            f"{value.name} does not fit {target.name}",
            value=worst,
            limit="finite in the type",
            remedy="use bf16 (FP32's range) or fp32",
        )


def _array(value: onnx_ir.Value) -> Array:
    """A constant's numbers in FP32."""
    if value.const_value is None:
        raise PrecisionError("no constant", value=value.name)
    return value.const_value.numpy().astype(np.float32)


def _int_attribute(name: str, value: int) -> onnx_ir.Attr:
    import onnx_ir as ir

    return ir.AttrInt64(name, value)


def _check(model: onnx_ir.Model, narrow: onnx_ir.DataType) -> None:
    import onnx_ir as ir

    if model.functions or list(model.graph.subgraphs()):
        raise PrecisionError(
            "the graph holds functions or subgraphs",
            value=sorted(str(name) for name in model.functions),
            remedy="inline the functions; conditions and loops are not supported",
        )
    floats = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
    values = (*model.graph.initializers.values(), *(output for node in model.graph for output in node.outputs))
    other = {str(value.dtype) for value in values if value.dtype in floats and value.dtype != narrow}
    if other:
        raise PrecisionError(
            "the graph already holds another floating-point type",
            value=sorted(other),
            limit=f"FLOAT and {narrow.name}",
            remedy="convert the exported FP32 graph",
        )
    untyped = [str(output.name) for node in model.graph for output in node.outputs if output.dtype is None]
    if untyped:
        raise PrecisionError(
            "tensors without a type",
            value=untyped[:5],
            limit="every tensor typed",
            remedy="run onnx_ir's ShapeInferencePass first",
        )


def _report(model: onnx_ir.Model, precision: Precision, clamped: tuple[str, ...]) -> PrecisionReport:
    import onnx_ir as ir

    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    narrow: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    casts = 0
    for node in model.graph:
        output, source = node.outputs[0], node.inputs[0] if node.inputs else None
        if node.op_type == "Cast":
            casts += output.dtype in floats and source is not None and source.dtype in floats
        elif output.dtype in floats:
            (wide if output.dtype == ir.DataType.FLOAT else narrow)[node.op_type] += 1
    constants = [value.const_value for value in model.graph.initializers.values() if value.dtype in floats]
    return PrecisionReport(
        precision=precision,
        narrow=dict(narrow.most_common()),
        wide=dict(wide.most_common()),
        casts=casts,
        clamped=clamped,
        weight_bytes=sum(tensor.nbytes for tensor in constants if tensor is not None),
    )
