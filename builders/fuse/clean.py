"""Step `clean`: everything that does nothing at run time."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as passes

from builders.fuse.cores import HEADS_OUT, KEYS_OUT, flat_keys
from builders.fuse.graph import add_node, attribute, operands, producer, rank, replace, scalar
from builders.fuse.step import Context

#: Gelu is an operator from 20 on, LayerNormalization from 17, ReduceMean's axes are an input from 18.
LEAST_OPSET = 20


@dataclass(frozen=True)
class Clean:
    """Constants folded, no-ops, duplicates and dead nodes removed.

    The work is that of onnxscript and onnx_ir: constant folding (Dropout in inference with it), casts, transposes,
    reshapes and slices that do nothing or follow each other, equal subexpressions and initializers. torch.onnx runs
    the like itself, so that a fresh export mostly has nothing left; a graph that enters with `--onnx` may be anyone's.

    Not `onnxscript.optimizer.optimize`: its rule for x + 0 compares with a tolerance of 1e-8 (0.7.2, `Constant` of
    rewriter/_pattern_ir.py) and so drops the epsilon 1e-12 of a BERT LayerNorm in pieces. Here x + 0, x - 0, x * 1 and
    x / 1 are exact.
    """

    name: str = "clean"
    about: str = "no-op removal: constants folded; identities, reshape chains, duplicates and dead nodes dropped"
    sites: tuple[str, ...] = ()

    def apply(self, model: ir.Model, context: Context) -> int:
        """Returns the number of nodes that went."""
        from onnxscript import optimizer, rewriter
        from onnxscript.rewriter.rules import common

        before = model.graph.num_nodes()
        rules = [common.cast_cast_rule, common.no_op_cast_rule, common.no_op_expand_rule, common.reshape_reshape_rule]
        rules += [common.no_op_transpose_rule, common.transpose_transpose_rule, common.unsqueeze_unsqueeze_rule]
        rules += [common.collapse_slice_rule, common.dropout_inference_rule, common.dropout_zero_rule]
        for _ in range(2):  # what one round uncovers, the next removes
            optimizer.fold_constants_ir(model, onnx_shape_inference=True)
            rewriter.rewrite(model, rules)
            _drop_neutral(model.graph)
            passes.IdentityEliminationPass()(model)
            passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
            passes.DeduplicateInitializersPass()(model)
            passes.CommonSubexpressionEliminationPass()(model)
        _straighten_keys(model.graph)
        sweep(model)
        return before - model.graph.num_nodes()


def _drop_neutral(graph: ir.Graph) -> None:
    """x + 0, x - 0, x * 1 and x / 1 by one exact number of at most x's rank."""
    neutral = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
    for node in list(graph):
        if node.domain or node.op_type not in neutral:
            continue
        for value, other in list(operands(node))[: 1 if node.op_type in ("Sub", "Div") else 2]:
            axes, own = rank(other), rank(value)
            if scalar(other) == neutral[node.op_type] and axes is not None and own is not None and axes <= own:
                replace(node.outputs[0], value)
                break


def _straighten_keys(graph: ir.Graph) -> None:
    """K^T as one Transpose where torch.onnx's attention goes through three axes and four computed shapes."""
    for node in list(graph):
        view = producer(flat_keys(node.outputs[0]), "Transpose")
        if view is None or attribute(view, "perm") != HEADS_OUT or node.op_type != "Reshape":
            continue
        (keys,) = add_node(
            node,
            "Transpose",
            [view.inputs[0]],
            name=f"{node.name}.transposed",
            like=node.outputs[0],
            attributes={"perm": KEYS_OUT},
        )
        replace(node.outputs[0], keys)


def sweep(model: ir.Model) -> None:
    """Drop what no output depends on, and put the nodes in an order in which they can run."""
    passes.RemoveUnusedNodesPass()(model)
    model.graph.sort()


def prepare(model: ir.Model) -> None:
    """What all steps count on: no functions, opset 20 or above, a shape at every value.

    Raises:
        FuseError: the graph's opset cannot be raised.
    """
    passes.InlinePass()(model)
    raise_opset(model, LEAST_OPSET)
    if any(value.shape is None for node in model.graph for value in node.outputs):
        passes.ShapeInferencePass()(model)


def raise_opset(model: ir.Model, opset: int) -> None:
    """Convert a graph of an older opset; a newer one stays.

    Raises:
        FuseError: a node has no counterpart in the wanted opset.
    """
    from onnxscript import version_converter

    from builders.errors import FuseError

    found = model.graph.opset_imports.get("", 0)
    if found >= opset:
        return
    # onnxscript converts upwards from 18; older graphs go through the converter of the onnx package.
    version_converter.convert_version(model, opset, fallback=True)
    if model.graph.opset_imports.get("", 0) < opset:
        raise FuseError(
            "the graph's opset cannot be raised",
            value=found,
            limit=f"opset {opset}",
            remedy="export the model again with a current torch.onnx",
        )
