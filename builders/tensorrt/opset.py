"""Standard operators of an older opset, for a parser that reads no newer one.

onnx's own version converter refuses the way down ("No Previous Version of Gelu exists"). Here an operator goes down
where its older schema has the same inputs and attributes and only knew fewer types, or where a rule below rewrites it;
the checker of `onnx` has the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from builders.errors import CompileError

if TYPE_CHECKING:
    import onnx_ir

# The IR version that came with an opset (onnx.helper.VERSION_TABLE): an old parser refuses a newer one.
_IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}


def lower_opset(model: onnx_ir.Model, opset: int) -> None:
    """Bring a graph down to an opset, in place; one that is there already is left alone.

    Raises:
        CompileError: operators that differ between the two; nothing was changed but what rules rewrote.
    """
    import onnx

    current = model.opset_imports.get("")
    if current is None or current <= opset:
        return
    stuck = []
    for node in list(model.graph):
        if (rule := _RULES.get((node.op_type, opset < 18))) is not None and rule(node):
            continue
        try:
            old = onnx.defs.get_schema(node.op_type, opset)
            new = onnx.defs.get_schema(node.op_type, current)
        except onnx.defs.SchemaError:
            stuck.append(node.op_type)
            continue
        # By what the node uses, not by what the newer schema offers: a default that is written out means nothing.
        inputs = sum(value is not None for value in node.inputs)
        if old.since_version != new.since_version:
            for name in set(node.attributes) - set(old.attributes):
                if name not in _MEANINGLESS:
                    stuck.append(f"{node.op_type} ({name})")
                    break
                del node.attributes[name]
            if inputs > old.max_input:
                stuck.append(f"{node.op_type} ({inputs} inputs)")
    if stuck:
        raise CompileError(
            f"operators that opset {opset} does not have",
            value=sorted(set(stuck)),
            limit=f"opset {opset}",
            remedy="use TensorRT 10.14 or newer, or leave out the fusion that made them (--skip)",
        )
    model.opset_imports[""] = opset
    model.graph.opset_imports[""] = opset
    model.ir_version = min(model.ir_version, _IR_VERSIONS.get(opset, model.ir_version))


# Attributes that came later and say what the older version always did for this project's types.
_MEANINGLESS = frozenset({"saturate", "round_mode"})


def _reduce(node: onnx_ir.Node) -> bool:
    """Axes were an attribute up to opset 17 (ReduceSum: up to 12)."""
    import onnx_ir as ir

    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = node.inputs[1].const_value
        if constant is None:
            return False
        node.attributes.add(ir.AttrInt64s("axes", [int(axis) for axis in constant.numpy().ravel()]))
        node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    return True


def _split(node: onnx_ir.Node) -> bool:
    """`num_outputs` came with 18; before, equal parts went without saying."""
    node.attributes.pop("num_outputs", None)
    return True


# By operator and whether the target is below opset 18.
_RULES: dict[tuple[str, bool], Callable[[onnx_ir.Node], bool]] = {
    ("Split", True): _split,
    **{
        (op, True): _reduce
        for op in ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
                   "ReduceSumSquare")
    },
}  # fmt: skip
