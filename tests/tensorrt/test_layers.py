from __future__ import annotations

import json

import pytest

from builders.errors import CompileError
from builders.tensorrt.layers import Fused, parse_inspector, parse_log
from builders.tensorrt.sites import Site, Sites

# Lines of TensorRT-RTX 1.7.1, shortened.
LOG = [
    "Registering layer: node_MatMul_60 for ONNX node: node_MatMul_60",
    "Layers:\n"
    "Name: __mye1_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, "
    "Metadata: \n"
    "Name: q [profile 1]+k [profile 1]+v [profile 1]_myl1_2, LayerType: gemm, Inputs: [ { Name: x, "
    "Dimensions: [-1,384], Datatype: Half, Format: (Linear) } ], Outputs: [ { Name: y, Datatype: Half } ], "
    "TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: q]\x1f[ONNX Layer: k]\x1f[ONNX Layer: v]\n"
    "Name: _gemm_mha_v2_myl0_13, LayerType: kgen, Inputs: [ { Name: a, Datatype: Half }, { Name: b, "
    "Datatype: Float } ], "
    "TacticName: _gemm_mha_v2_0x9e, StreamId: 0, Metadata: [ONNX Layer: one[0]]\x1f[ONNX Layer: two]\n"
    "Name: __mye2_myl0_3, LayerType: signal, Inputs: [], TacticName: , StreamId: 0, EventId: 1, Metadata: \n"
    "\n"
    "I/O Tensors:\n Name: input_ids, IOMode: Input, DataType: Int32",
]


def test_layers_are_read_when_in_the_log() -> None:
    product, attention = parse_log(LOG).layers
    assert (product.kind, product.profile, product.nodes, product.types) == ("gemm", 1, ("q", "k", "v"), ("Half",))
    assert (attention.profile, attention.nodes, attention.types) == (0, ("one[0]", "two"), ("Float", "Half"))
    assert attention.tactic == "_gemm_mha_v2_0x9e"


def test_place_is_unfused_when_a_profile_lacks_it() -> None:
    listing = parse_log(LOG)
    assert listing.profiles == (0, 1)
    assert listing.unfused([Site(frozenset({"q", "k"}))]) == [Site(frozenset({"q", "k"}))]
    assert json.loads(listing.to_json())[0]["nodes"] == ["q", "k", "v"]


def test_same_layers_are_read_when_from_the_inspector() -> None:
    entries = [
        {"Name": "q+k_myl0_2", "LayerType": "gemm", "Inputs": [{"Name": "x", "Datatype": "Half"}],
         "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP16 format"}], "TacticName": "sm90_gemm",
         "Metadata": "[ONNX Layer: q]\x1e[ONNX Layer: k]"},
        {"Name": "w", "LayerType": "wait"},
    ]  # fmt: skip
    (layer,) = parse_inspector(json.dumps({"Layers": entries})).layers
    assert (layer.name, layer.nodes, layer.types, layer.tactic) == ("q+k_myl0_2", ("q", "k"), ("Half",), "sm90_gemm")


# What the inspector of 8.6.0 says of an encoder (H200), shortened: one layer that hides everything, and a free batch.
INSPECTOR_8_6 = (
    '{"Layers": [{\n "Name": "{ForeignNode[positions.numbers.rows...node_linalg_vector_norm_114]}",\n'
    ' "LayerType": "Myelin", "Inputs": [{"Name": "input_ids", "Dimensions": [-1,128],'
    ' "Format/Datatype": "N/A due to dynamic shapes"}], "Outputs": [], "StreamId": 0, "Metadata": ""\n},{\n'
    ' "Name": "PWN(PWN(node_clamp_min_1), node_div_1)", "LayerType": "PointWiseV2", "Inputs": [], "Outputs": [],\n'
    ' "Metadata": "[ONNX Layer: node_clamp_min_1]\x1e[ONNX Layer: node_div_1]"\n}],\n"Bindings": ["input_ids"]}'
)


def test_hidden_layers_are_counted_when_the_inspector_is_that_of_8_6() -> None:
    listing = parse_inspector(INSPECTOR_8_6)
    hidden, last = listing.layers
    assert (hidden.kind, hidden.nodes, hidden.types) == ("Myelin", (), ())
    assert last.nodes == ("node_clamp_min_1", "node_div_1")
    counts = listing.counts(Sites((Site(frozenset({"softmax"})),), (), (), ()))
    assert (counts.layers, counts.opaque, counts.attention) == (2, 1, Fused(0, 1))


def test_refused_when_there_is_no_listing() -> None:
    with pytest.raises(CompileError, match="no layer listing"):
        parse_log(LOG[:1])
    with pytest.raises(CompileError, match=r"layer names only.*DETAILED"):
        parse_inspector('{"Layers": ["a", "b"]}')
    with pytest.raises(CompileError, match="cannot be read"):
        parse_inspector("no JSON")
