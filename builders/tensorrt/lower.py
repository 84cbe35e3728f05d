"""A graph for one TensorRT: what its parser does not know is written out, and the opset comes down to what it reads.

| target           | opset | GELU      | attention     | one size of a shape | LayerNormalization |
| 8.6              | 17    | Erf form  | written out   | Shape and Gather    | kept               |
| 10.0 to 10.13    | 20    | kept      | written out   | Shape and Gather    | kept               |
| 10.14, 11, RTX   | 23    | kept      | kept          | kept                | kept               |

LayerNormalization is in opset 17 and in 8.6's parser (onnx-tensorrt, Changelog of 8.6 EA). A graph below a target's
opset is left at its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from builders.errors import CompileError
from builders.tensorrt.capabilities import Capabilities
from builders.tensorrt.opset import lower_opset

if TYPE_CHECKING:
    import onnx_ir

_INT32 = 6  # TensorProto.INT32


@dataclass(frozen=True)
class LowerReport:
    """What was changed."""

    opset: int
    """Opset of the graph afterwards."""
    expanded: dict[str, int]
    """Operators that were written out, with their number."""


def lower(model: onnx_ir.Model, target: Capabilities) -> LowerReport:
    """Fit a graph to a TensorRT, in place; a second call changes nothing.

    Args:
        model: a fused graph, after `builders.precision.convert`.
        target: what the TensorRT can do.

    Raises:
        CompileError: an operator cannot be brought down to the target's opset, an input is not INT32, or a type is
            unknown to the target.
    """
    import onnx_ir as ir

    graph = model.graph
    wrong = {value.name: str(value.dtype) for value in graph.inputs if value.dtype != _INT32}
    if wrong:
        raise CompileError("graph inputs of another type", value=wrong, limit="INT32", remedy="export the model again")
    if not target.bf16 and any(v.dtype == ir.DataType.BFLOAT16 for node in graph for v in node.outputs):
        raise CompileError("this TensorRT has no BF16", value="bf16", limit="10 or newer", remedy="use fp16")
    rules: dict[str, Callable[[_Writer, onnx_ir.Node], onnx_ir.Value]] = {}
    if not target.gelu_op:
        rules["Gelu"] = _gelu
    if not target.attention_op:
        rules["Attention"] = _attention
    if not target.shape_range:
        rules["Shape"] = _shape
    expanded: Counter[str] = Counter()
    for node in list(graph):
        if node.op_type == "Attention" and target.attention_op:
            # The parser refuses it: "Setting softmax precision is not supported in TensorRT Attention" (RTX 1.7.1).
            node.attributes.pop("softmax_precision", None)
        if node.op_type == "Shape" and not {"start", "end"} & set(node.attributes):
            continue  # the whole shape
        if rule := rules.get(node.op_type):
            writer = _Writer(graph, node)
            result = rule(writer, node)
            ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
            graph.remove(node, safe=True)
            expanded[node.op_type] += 1
    lower_opset(model, target.max_opset)
    return LowerReport(int(model.opset_imports[""]), dict(expanded))


class _Writer:
    """Inserts nodes before the one they replace; all in that node's type, named after it."""

    def __init__(self, graph: onnx_ir.Graph, node: onnx_ir.Node):
        self.graph, self.node, self.dtype = graph, node, node.outputs[0].dtype
        self.made = 0

    def add(
        self, op: str, inputs: Sequence[onnx_ir.Value], attributes: Mapping[str, Any] | None = None,
        dtype: onnx_ir.DataType | None = None,
    ) -> onnx_ir.Value:  # fmt: skip
        """Insert an operator."""
        import onnx_ir as ir

        # The last part keeps the operator's name, so that the listing of a plan reads as the graph does.
        node = ir.node(op, inputs, attributes or {}, name=f"{self.node.name}_{op}_{self.made}")
        self.made += 1
        node.metadata_props.update(self.node.metadata_props)
        node.outputs[0].name = f"{self.node.outputs[0].name}_{node.name}"
        kind = dtype or self.dtype
        node.outputs[0].type = ir.TensorType(kind) if kind is not None else None
        self.graph.insert_before(self.node, node)
        return node.outputs[0]

    def constant(self, array: np.ndarray[Any, Any], what: str) -> onnx_ir.Value:
        """A constant in the array's own type."""
        import onnx_ir as ir

        name = f"{self.node.name}_{what}"
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def scalar(self, number: float, what: str) -> onnx_ir.Value:
        """A constant number in the node's type."""
        if self.dtype is None:
            raise CompileError("a tensor without a type", value=self.node.name, remedy="run onnx_ir's shape inference")
        return self.constant(np.array(number, dtype=self.dtype.numpy()), what)


def _gelu(write: _Writer, node: onnx_ir.Node) -> onnx_ir.Value:
    """x/2 (1 + erf(x/sqrt 2)), or the tanh form: the definitions of ONNX Gelu-20."""
    value = _input(node, 0)
    approximate = node.attributes.get("approximate")
    if approximate is None or approximate.as_string() == "none":
        inner = write.add("Erf", [write.add("Div", [value, write.scalar(math.sqrt(2), "sqrt2")])])
    else:
        cube = write.add("Mul", [write.add("Mul", [value, value]), value])
        bent = write.add("Add", [value, write.add("Mul", [cube, write.scalar(0.044715, "cubic")])])
        inner = write.add("Tanh", [write.add("Mul", [bent, write.scalar(math.sqrt(2 / math.pi), "slope")])])
    total = write.add("Add", [inner, write.scalar(1, "one")])
    return write.add("Mul", [write.add("Mul", [value, total]), write.scalar(0.5, "half")])


def _attention(write: _Writer, node: onnx_ir.Node) -> onnx_ir.Value:
    """Scores, mask, softmax in FP32, product: the definition of ONNX Attention-23 without cache, cap and causality."""
    import onnx_ir as ir

    names = {"scale", "q_num_heads", "kv_num_heads", "softmax_precision", "is_causal", "softcap"}
    odd = sorted(set(node.attributes) - names)
    causal, cap = (_number(node, name, 0.0) for name in ("is_causal", "softcap"))
    if odd or causal or cap or len(node.outputs) > 1 or any(value is not None for value in node.inputs[4:]):
        raise CompileError(
            "an Attention operator that this project cannot write out",
            value=node.name,
            limit="no cache, causality or cap",
            remedy="leave the attention step out (--skip), or use TensorRT 10.14",
        )
    query, key, value = (_input(node, i) for i in range(3))
    heads = int(_number(node, "q_num_heads", 0))
    if heads != int(_number(node, "kv_num_heads", 0)):
        raise CompileError("grouped heads", value=node.name, limit="as many key as query heads", remedy="use 10.14")
    if heads:  # [b, L, heads * d]
        query, key, value = (_split_heads(write, tensor, heads, i) for i, tensor in enumerate((query, key, value)))
    turned = write.add("Transpose", [key], {"perm": (0, 1, 3, 2)})
    scores = write.add("MatMul", [query, turned])
    scores = write.add("Mul", [scores, _scale(write, node, _input(node, 0), heads)])
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if mask is not None:
        if mask.dtype == ir.DataType.BOOL:
            hidden = [write.scalar(number, what) for number, what in ((0, "seen"), (-1e4, "masked"))]
            mask = write.add("Where", [mask, *hidden])
        scores = write.add("Add", [scores, mask])
    wide = ir.DataType.FLOAT
    if write.dtype != wide:
        scores = write.add("Cast", [scores], {"to": int(wide)}, wide)
    shares = write.add("Softmax", [scores], {"axis": -1}, wide)
    if write.dtype != wide:
        shares = write.add("Cast", [shares], {"to": int(write.dtype or wide)})
    result = write.add("MatMul", [shares, value])
    if not heads:
        return result
    rows = write.add("Transpose", [result], {"perm": (0, 2, 1, 3)})
    return write.add("Reshape", [rows, write.constant(np.array([0, 0, -1], np.int64), "rows")])


def _shape(write: _Writer, node: onnx_ir.Node) -> onnx_ir.Value:
    """The whole shape, and the wanted sizes of it."""
    value = _input(node, 0)
    if value.shape is None:
        raise CompileError(
            "a Shape of a tensor of unknown rank", value=node.name, remedy="run onnx_ir's shape inference"
        )
    rank = len(value.shape)
    bounds = slice(int(_number(node, "start", 0)), int(_number(node, "end", rank)))
    wanted = write.constant(np.arange(rank)[bounds], "axes")
    return write.add("Gather", [write.add("Shape", [value]), wanted], {"axis": 0})


def _split_heads(write: _Writer, tensor: onnx_ir.Value, heads: int, place: int) -> onnx_ir.Value:
    shape = write.constant(np.array([0, 0, heads, -1], np.int64), f"heads_{place}")
    return write.add("Transpose", [write.add("Reshape", [tensor, shape])], {"perm": (0, 2, 1, 3)})


def _scale(write: _Writer, node: onnx_ir.Node, query: onnx_ir.Value, heads: int) -> onnx_ir.Value:
    given = node.attributes.get("scale")
    if given is not None:
        return write.scalar(given.as_float(), "scale")
    width = query.shape[-1] if query.shape is not None else None
    if not isinstance(width, int):
        raise CompileError("an Attention operator without scale or known width", value=node.name, remedy="set `scale`")
    return write.scalar(1 / math.sqrt(width // heads if heads else width), "scale")


def _input(node: onnx_ir.Node, place: int) -> onnx_ir.Value:
    value = node.inputs[place]
    if value is None:
        raise CompileError(f"{node.op_type} lacks input {place}", value=node.name, remedy="export the model again")
    return value


def _number(node: onnx_ir.Node, name: str, default: float) -> float:
    found = node.attributes.get(name)
    return default if found is None else float(found.value)
