"""Types of the graph held in a network that has no strong typing (TensorRT 8.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir
    import tensorrt as trt


def node_types(model: onnx_ir.Model) -> dict[str, str]:
    """Node name to the type of its result, `FLOAT` or `FLOAT16`, for nodes with a floating-point result."""
    import onnx_ir as ir

    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    found = ((node.name, node.outputs[0].dtype) for node in model.graph if node.op_type != "Cast")
    return {str(name): dtype.name for name, dtype in found if dtype in floats}


def hold_types(
    module: Any, network: trt.INetworkDefinition, config: trt.IBuilderConfig, types: Mapping[str, str]
) -> int:
    """Set every layer's precision and output type to the graph's, and oblige the builder to them.

    FP16 alone would let 8.6 put any layer into FP16, softmax and pooling sums too.

    Args:
        module: `tensorrt`.
        network: the parsed graph; the parser names layers after nodes.
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
    held = 0
    for place in range(network.num_layers):
        layer: trt.ILayer = network.get_layer(place)
        kind = kinds.get(types.get(layer.name, ""))
        if kind is None or layer.type in fixed:
            continue
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        if any(output.is_shape_tensor or output.dtype not in kinds.values() for output in outputs):
            continue
        layer.precision = kind
        for number in range(layer.num_outputs):
            layer.set_output_type(number, kind)
        held += 1
    return held
