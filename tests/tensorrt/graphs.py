"""Small graphs with one thing in them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

# Heads of 32: TensorRT-RTX 1.7 has a kernel for heads of 16 and more, in FP16 and BF16.
HEADS, WIDTH = 4, 128


def attention_graph(*, opset: int = 23, rank: int = 3, mask: bool = True, scale: bool = True) -> ir.Model:
    """`input_ids` and `length` to `EMBEDDING` through one Attention operator, in FP32."""
    attributes: dict[str, int | float] = {} if rank == 4 else {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    if scale:
        attributes["scale"] = float((WIDTH // HEADS) ** -0.5)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["rows"], name="rows")]
    heads = []
    for name in ("query", "key", "value"):
        nodes.append(helper.make_node("MatMul", ["rows", f"{name}_weight"], [name], name=name))
        if rank == 4:
            nodes.append(helper.make_node("Reshape", [name, "split"], [f"{name}_split"], name=f"{name}_split"))
            nodes.append(
                helper.make_node(
                    "Transpose", [f"{name}_split"], [f"{name}_heads"], name=f"{name}_heads", perm=[0, 2, 1, 3]
                )
            )
        heads.append(f"{name}_heads" if rank == 4 else name)
    nodes.append(helper.make_node("Less", ["steps", "length"], ["real"], name="real"))
    nodes.append(helper.make_node("Unsqueeze", ["real", "mask_axes"], ["row_mask"], name="row_mask"))
    # ONNX Runtime's Attention does not broadcast the mask over the queries.
    nodes.append(helper.make_node("Expand", ["row_mask", "square"], ["mask"], name="mask"))
    inputs = [*heads, *(["mask"] if mask else [])]
    nodes.append(helper.make_node("Attention", inputs, ["mixed"], name="attention", **attributes))
    if rank == 4:
        nodes.append(helper.make_node("Transpose", ["mixed"], ["turned"], name="turned", perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", ["turned", "join"], ["joined"], name="joined"))
    pooled = "joined" if rank == 4 else "mixed"
    nodes.append(helper.make_node("ReduceMean", [pooled, "axes"], ["EMBEDDING"], name="pool", keepdims=0))
    random = np.random.default_rng(1)
    constants = {
        "table": random.standard_normal((50, WIDTH)).astype(np.float32),
        **{
            f"{name}_weight": (random.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float32)
            for name in ("query", "key", "value")
        },
        "split": np.array([0, 0, HEADS, -1]),
        "join": np.array([0, 0, -1]),
        "steps": np.arange(16, dtype=np.int32)[None],
        "mask_axes": np.array([1, 2]),
        "square": np.array([1, 1, 16, 16]),
        "axes": np.array([1]),
    }
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["b", 16]),
            helper.make_tensor_value_info("length", TensorProto.INT32, ["b", 1]),
        ],
        [helper.make_tensor_value_info("EMBEDDING", TensorProto.FLOAT, ["b", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def attention_feed() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    ids = random.integers(0, 50, (3, 16)).astype(np.int32)
    return {"input_ids": ids, "length": np.array([[16], [5], [1]], np.int32)}
