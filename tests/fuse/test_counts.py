"""Sites and parity of whole fusions, per family, spelling of the graph and target."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from builders.errors import FuseError
from builders.fuse import TARGETS, block_outputs, count_sites, expected_sites
from tests.fuse.models import HEADS, LAYERS, LIMIT, answers, assert_equal, decompose, feeds, fused, random_encoder

GraphOf = Callable[..., ir.Model]
OPERATOR = "attention_operator"


def test_table_is_that_of_the_issue_when_layers_are_twelve() -> None:
    sites = expected_sites("bert", 12)
    assert (sites["qkv"], sites["attention"], sites["gelu"], sites["layer_norm"]) == (12, 12, 12, 25)
    # A family without a row is fused as found: nothing is asserted of it.
    assert expected_sites("albert", 12) == {}


def test_traits_of_a_config_change_the_table() -> None:
    plain, learned = expected_sites("deberta-v2", 12), expected_sites("deberta-v2", 12, {"learned_positions"})
    assert (plain["positions"], learned["positions"], plain["layer_norm"]) == (0, 1, 25)
    assert expected_sites("deberta-v2", 24, {"convolution"})["layer_norm"] == 50
    assert expected_sites("bert", 12, {"no_gelu", "learned_positions"}) == expected_sites("bert", 12) | {"gelu": 0}
    tagger = expected_sites("modernbert", 22, {"local_attention", "token_head"})
    assert (tagger["gelu"], tagger["layer_norm"], tagger["positions"]) == (23, 46, 4)


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-10.14"])
def test_default_model_has_its_sites_and_answers_when_fused(minilm_onnx: Path, target: str) -> None:
    model = ir.load(minilm_onnx)
    batches = feeds(512, 30522)
    expected = answers(model, batches)
    result, report = fused(model, "bert", layers=6, target=target)
    wanted = {"qkv": 6, "attention": 6, "scale_mask": 6, "gelu": 6, "layer_norm": 13, "positions": 1}
    single = 6 if target == "tensorrt-10.14" else 0
    assert report.found == wanted | {OPERATOR: single}
    assert (report.nodes_before, report.nodes_after) == (206, 113 if single else 179)
    assert report.operators_after["MatMul"] == (24 if single else 36)
    assert "Range" not in report.operators_after
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    assert_equal(answers(result, batches), expected)


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-8.6", "tensorrt-10.14"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta", "distilbert"])
def test_family_has_its_sites_and_answers_when_fused(graph_of: GraphOf, family: str, target: str) -> None:
    model = graph_of(family)
    result, report = fused(model, family, target=target)
    off = TARGETS[target].off
    ran = "attention" not in off
    merged = {"qkv": 0} if "qkv" in off else {}
    assert report.found == expected_sites(family, LAYERS) | merged | {OPERATOR: LAYERS if ran else 0}
    assert report.nodes_after < report.nodes_before
    assert report.opset == (23 if ran else 20)
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    batches = feeds(LIMIT)
    assert_equal(answers(result, batches), answers(model, batches))


def test_answers_equal_torch_when_fused(graph_of: GraphOf) -> None:
    import torch

    encoder = random_encoder("mpnet")
    result, _ = fused(graph_of("mpnet"), "mpnet", target="tensorrt-rtx")
    batches = feeds(LIMIT)
    expected = [encoder(*(torch.from_numpy(batch[name]) for name in ("input_ids", "length"))) for batch in batches]
    assert_equal(answers(result, batches), torch.cat(expected).numpy())


@pytest.mark.parametrize("opset", [20, 23])
def test_sdpa_export_is_fused_when_target_takes_the_operator(graph_of: GraphOf, opset: int) -> None:
    result, report = fused(graph_of("bert", "sdpa", opset), "bert", target="tensorrt-10.14")
    assert report.found == expected_sites("bert", LAYERS)
    assert not {"Transpose", "Softmax", "Reshape"} & set(report.operators_after)
    # The reference is the eager export: ONNX Runtime 1.32 cannot run the unfused one of opset 23 (mask [b, 1, 1, L]).
    batches = feeds(LIMIT)
    assert_equal(answers(result, batches), answers(graph_of("bert"), batches))


def test_sdpa_export_is_as_small_as_the_eager_one_when_decomposed(graph_of: GraphOf) -> None:
    result, report = fused(graph_of("bert", "sdpa", 20), "bert")
    assert {step.name: step.changed for step in report.steps}["clean"]  # the detour of K^T is straightened
    assert report.operators_after == fused(graph_of("bert"), "bert")[1].operators_after
    batches = feeds(LIMIT)
    assert_equal(answers(result, batches), answers(graph_of("bert"), batches))


def test_refused_when_operator_came_in_and_target_does_not_take_it(graph_of: GraphOf) -> None:
    with pytest.raises(FuseError, match=r"3 Attention, target tensorrt-8\.6.*export with eager attention"):
        fused(graph_of("bert", "sdpa", 23), "bert", target="tensorrt-8.6")


@pytest.mark.parametrize("gelu", ["none", "tanh", "fast"])
def test_pieces_become_operators_when_exporter_wrote_them(graph_of: GraphOf, gelu: str) -> None:
    whole = graph_of("bert").clone()
    for node in whole.graph:
        if node.op_type == "Gelu":
            node.attributes["approximate"] = ir.AttrString("approximate", "none" if gelu == "none" else "tanh")
    pieces = decompose(whole, gelu=gelu)
    assert (count_sites(pieces).sites["layer_norm"], count_sites(pieces).sites["gelu"]) == (0, 0)
    result, report = fused(pieces, "bert")
    assert report.found == expected_sites("bert", LAYERS) | {OPERATOR: 0}
    assert {step.name: step.rewritten for step in report.steps}["layer_norm"] == 2 * LAYERS + 1
    found = {node.attributes["approximate"].value for node in result.graph if node.op_type == "Gelu"}
    assert found == {"none" if gelu == "none" else "tanh"}
    batches = feeds(LIMIT)
    assert_equal(answers(result, batches), answers(whole, batches))


def test_blocks_have_the_same_names_when_fused_or_not(graph_of: GraphOf) -> None:
    model = graph_of("bert")
    result, report = fused(model, "bert", target="tensorrt-10.14")
    names = ["embeddings.norm"]
    for layer in range(LAYERS):
        names += [f"layer.{layer}.attention.norm", f"layer.{layer}.output.norm"]
    names.append("pooled")
    assert [block.name for block in block_outputs(model)] == names
    assert [(block.name, block.value) for block in report.blocks] == [
        (name, "EMBEDDING" if name == "pooled" else name) for name in names
    ]
    # They are the same tensors, too.
    seen = []
    for graph in (model.clone(), result.clone()):
        blocks = {block.value for block in block_outputs(graph)[:-1]}
        values = [node.outputs[0] for node in graph.graph if node.outputs[0].name in blocks]
        graph.graph.outputs[:] = values
        seen.append([answers_of(graph, value.name) for value in values])
    for before, after in zip(*seen, strict=True):
        np.testing.assert_allclose(after, before, atol=2e-5)


def answers_of(model: ir.Model, name: str | None) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found: np.ndarray = session.run([name], feeds(LIMIT)[2])[0]
    return found


def test_blocks_are_refused_when_norms_are_in_pieces(graph_of: GraphOf) -> None:
    with pytest.raises(FuseError, match=r"0 LayerNormalization.*run the step `layer_norm` first"):
        block_outputs(decompose(graph_of("bert")))


def test_mask_of_every_head_is_shared_when_positions_are_relative(graph_of: GraphOf) -> None:
    result, _ = fused(graph_of("mpnet"), "mpnet", target="tensorrt-10.14")
    masks = {node.inputs[3] for node in result.graph if node.op_type == "Attention"}
    assert len(masks) == 1
    assert {node.attributes["q_num_heads"].value for node in result.graph if node.op_type == "Attention"} == {HEADS}


@pytest.mark.skipif("MPNET_DIR" not in os.environ, reason="set MPNET_DIR to a folder with all-mpnet-base-v2")
def test_mpnet_is_fused_end_to_end_when_its_weights_are_here(tmp_path: Path) -> None:
    from builders.export import export_onnx
    from builders.settings import ModelSettings
    from builders.source import open_source

    source = open_source(ModelSettings(source=os.environ["MPNET_DIR"]))
    assert (source.positions, source.architecture.first_position, source.max_tokens) == (512, 2, 384)
    report = export_onnx(source, tmp_path / "model.onnx")
    model = ir.load(report.path)
    batches = feeds(source.positions, 30527)
    expected = answers(model, batches)
    for target in ("onnxruntime", "tensorrt-10.14"):
        result, fusion = fused(model, "mpnet", layers=12, target=target)
        assert fusion.found == expected_sites("mpnet", 12) | {OPERATOR: fusion.found[OPERATOR]}
        assert_equal(answers(result, batches), expected)
