"""Types of the graph held in a network that has no strong typing (TensorRT 8.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir
    import tensorrt as trt


def node_types(model: onnx_ir.Model) -> dict[str, str]:
    """Names of nodes and of their results to the type of the result, `FLOAT` or `FLOAT16`; Casts are left out."""
    import onnx_ir as ir

    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    found: dict[str, str] = {}
    for node in model.graph:
        for value in node.outputs if node.op_type != "Cast" else ():
            if value.dtype in floats:
                found[str(value.name)] = found[str(node.name)] = value.dtype.name
    return found


def hold_types(
    module: Any, network: trt.INetworkDefinition, config: trt.IBuilderConfig, types: Mapping[str, str]
) -> int:
    """Set every layer's precision and output type to the graph's, and oblige the builder to them.

    FP16 alone would let 8.6 put any layer into FP16, softmax and pooling sums too.

    A layer is found by its own name or by its result's: the parser of 8.6 leaves normalizations without a name. Layers
    that it adds by itself (squares and root of a ReduceL2, a bias in more dimensions) stand before the one that closes
    their node and get that one's type.

    Args:
        module: `tensorrt`.
        network: the parsed graph; the parser names layers after nodes, and tensors as they are named there.
        config: gets FP16 (where the graph has any) and OBEY_PRECISION_CONSTRAINTS.
        types: of `node_types`.

    Returns:
        Layers that were set.
    """
    kinds = {"FLOAT": module.DataType.FLOAT, "FLOAT16": module.DataType.HALF}
    if "FLOAT16" in types.values():
        config.set_flag(module.BuilderFlag.FP16)
    config.set_flag(module.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    # Their types follow from what they hold.
    fixed = {module.LayerType.CONSTANT, module.LayerType.SHAPE, module.LayerType.CAST}
    held, kind = 0, None
    for place in reversed(range(network.num_layers)):
        layer: trt.ILayer = network.get_layer(place)
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        names = (layer.name, *(output.name for output in outputs))
        kind = next((kinds[types[name]] for name in names if name in types), kind)
        if kind is None or layer.type in fixed:
            continue
        if any(output.is_shape_tensor or output.dtype not in kinds.values() for output in outputs):
            continue
        layer.precision = kind
        for number in range(layer.num_outputs):
            layer.set_output_type(number, kind)
        held += 1
    return held
