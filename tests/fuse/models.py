"""Small random encoders of each family, exported, and what a graph answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from builders.backbone import Backbone
from builders.contract import INPUTS, OUTPUT
from builders.encoder import ContractEncoder
from builders.export import _quiet_export
from builders.families import read_architecture
from builders.fuse import FuseReport, fuse
from builders.fuse.graph import add_constant, add_node, replace
from builders.heads import EmbeddingHead, NormalizeStep

Floats = np.ndarray[Any, np.dtype[np.float32]]

LAYERS, HIDDEN, HEADS, LIMIT, WORDS = 3, 48, 4, 200, 300
"""Heads of width 12: their scale, 0.2887, is no power of two and is rounded when it is folded."""


def random_encoder(family: str, *, attention: str = "eager") -> ContractEncoder:
    """A model of a family with every parameter random, biases and LayerNorms included; mean pooled, normalised."""
    import transformers

    torch.manual_seed(0)
    first = 2 if family in ("mpnet", "roberta") else 0
    common = {"vocab_size": WORDS, "max_position_embeddings": LIMIT + first, "attn_implementation": attention}
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 96}
    model: Any
    if family == "bert":
        model = transformers.BertModel(transformers.BertConfig(**sizes, **common), add_pooling_layer=False)
    elif family == "mpnet":
        model = transformers.MPNetModel(transformers.MPNetConfig(**sizes, **common), add_pooling_layer=False)
    elif family == "roberta":
        config = transformers.RobertaConfig(**sizes, **common, type_vocab_size=1)
        model = transformers.RobertaModel(config, add_pooling_layer=False)
    else:
        config = transformers.DistilBertConfig(dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, hidden_dim=96, **common)
        model = transformers.DistilBertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    architecture = read_architecture(model.config.to_dict(), Path("random"))
    encoder = ContractEncoder(Backbone(model, architecture), EmbeddingHead(("mean",), (NormalizeStep(),)))
    return encoder.eval().requires_grad_(False)


def exported(encoder: ContractEncoder, opset: int = 20) -> ir.Model:
    """The graph as builders/export.py traces it."""
    batch, long = torch.export.Dim("b", min=1), torch.export.Dim("L", min=1, max=LIMIT)
    example = (torch.ones(3, 16, dtype=torch.int32), torch.tensor([[16], [5], [9]], dtype=torch.int32))
    with _quiet_export():
        program = torch.onnx.export(
            encoder,
            example,
            dynamo=True,
            dynamic_shapes=({0: batch, 1: long}, {0: batch}),
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    return model


def feeds(limit: int, words: int = WORDS) -> list[dict[str, Any]]:
    """Batches of lengths 1, 2, mixed and the limit."""
    random = np.random.default_rng(0)
    batches = [(1, [1]), (2, [2, 1]), (40, [40, 1, 17, 33]), (limit, [limit, 3, limit - 1])]
    return [
        {
            "input_ids": random.integers(0, words, (len(rows), width)).astype(np.int32),
            "length": np.array(rows, dtype=np.int32)[:, None],
        }
        for width, rows in batches
    ]


def answers(model: ir.Model, batches: list[dict[str, Any]]) -> Floats:
    """All rows of all batches, [rows, dim]."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    rows: Floats = np.concatenate([session.run(None, batch)[0] for batch in batches])
    return rows


def assert_equal(got: Floats, expected: Floats) -> None:
    """Rows differ by rounding only, and are no degenerate answers."""
    assert np.isfinite(got).all()
    assert np.isfinite(expected).all()
    assert expected.std(axis=0).max() > 1e-3  # texts differ: a constant answer would pass everything
    assert np.abs(got - expected).max() < 2e-5
    cosines = (got * expected).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert cosines.min() > 0.999999


def fused(model: ir.Model, family: str, **options: Any) -> tuple[ir.Model, FuseReport]:
    """A fused copy."""
    copy = model.clone()
    return copy, fuse(copy, family=family, layers=options.pop("layers", LAYERS), **options)


def decompose(model: ir.Model, *, gelu: str = "none") -> ir.Model:
    """A copy as an older exporter writes it: LayerNorm and GELU in pieces, constants at the left of each product.

    `gelu` is the form: `none` by Erf, `tanh` with a power, `fast` as transformers' gelu_fast groups it.
    """
    model = model.clone()
    graph = model.graph
    constants = {
        name: add_constant(graph, f"piece.{name}", np.array(value, dtype=np.float32))
        for name, value in {
            "half": 0.5,
            "one": 1,
            "two": 2,
            "three": 3,
            "root": 2**0.5,
            "c": 0.044715,
            "t": 0.7978846,
        }.items()
    }
    axes = add_constant(graph, "piece.axes", np.array([-1], dtype=np.int64))
    for node in list(graph):
        x, output = node.inputs[0], node.outputs[0]

        def op(kind: str, *inputs: Any, node: ir.Node = node, output: ir.Value = output, **attributes: Any) -> ir.Value:
            (value,) = add_node(
                node, kind, inputs, name=f"piece.{node.name}.{graph.num_nodes()}", attributes=attributes
            )
            value.type, value.shape = output.type, output.shape
            return value

        if node.op_type == "LayerNormalization":
            epsilon = np.array(node.attributes["epsilon"].value, dtype=np.float32)
            off = op("Sub", x, op("ReduceMean", x, axes, keepdims=1))
            variance = op("ReduceMean", op("Pow", off, constants["two"]), axes, keepdims=1)
            root = op("Sqrt", op("Add", variance, add_constant(graph, "piece.epsilon", epsilon)))
            replace(output, op("Add", node.inputs[2], op("Mul", node.inputs[1], op("Div", off, root))))
        elif node.op_type == "Gelu" and gelu == "none":
            gate = op("Add", op("Erf", op("Div", x, constants["root"])), constants["one"])
            replace(output, op("Mul", constants["half"], op("Mul", x, gate)))
        elif node.op_type == "Gelu" and gelu == "fast":
            inner = op("Add", constants["one"], op("Mul", x, op("Mul", x, constants["c"])))
            gate = op("Tanh", op("Mul", op("Mul", x, constants["t"]), inner))
            replace(output, op("Mul", op("Mul", constants["half"], x), op("Add", constants["one"], gate)))
        elif node.op_type == "Gelu":
            inner = op("Add", x, op("Mul", constants["c"], op("Pow", x, constants["three"])))
            gate = op("Add", constants["one"], op("Tanh", op("Mul", constants["t"], inner)))
            replace(output, op("Mul", op("Mul", constants["half"], x), gate))
    ir.passes.common.RemoveUnusedNodesPass()(model)
    return model
