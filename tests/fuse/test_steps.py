"""Each step by itself, what is refused, and what the gate catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from builders.errors import FuseError
from builders.fuse import Context, count_sites, default_steps, fuse, list_steps
from builders.fuse.graph import add_constant, add_node, constant, replace
from builders.fuse.relative import find_relative
from tests.fuse.models import LAYERS, LIMIT, answers, assert_equal, decompose, feeds, fused

GraphOf = Callable[..., ir.Model]
NAMES = ["layer_norm", "gelu", "clean", "positions", "qkv", "scale_mask", "attention"]


def test_steps_are_listed_in_their_order() -> None:
    assert sorted(step.name for step in list_steps()) == sorted(NAMES)
    assert all(step.about for step in list_steps())
    assert "attention" in [step.name for step in default_steps("tensorrt-rtx")]
    for target in ("onnxruntime", "tensorrt-8.6", "tensorrt-10"):
        assert "attention" not in [step.name for step in default_steps(target)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_answers_stay_when_one_step_runs_alone(graph_of: GraphOf, family: str, name: str) -> None:
    model = graph_of(family)
    result, report = fused(model, family, only=[name])
    (step,) = report.steps
    assert step.name == name
    assert sorted(report.skipped) == sorted(set(NAMES) - {name})
    # torch.onnx writes LayerNorm and GELU as operators and cleans up by itself.
    assert step.changed == (name not in ("layer_norm", "gelu", "clean"))
    assert ("left the graph unchanged" in str(step)) is not step.changed
    assert_equal(answers(result, feeds(LIMIT)), answers(model, feeds(LIMIT)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_answers_stay_when_one_step_is_skipped(graph_of: GraphOf, family: str, name: str) -> None:
    model = graph_of(family)
    result, report = fused(model, family, target="tensorrt-10.14", skip=[name])
    assert name in report.skipped
    missing = {kind for kind in report.expected if report.found[kind] != report.expected[kind]}
    assert missing == (
        {"attention": {"attention_operator"}, "qkv": {"qkv"}} | {kind: {kind} for kind in ("scale_mask", "positions")}
    ).get(name, set())
    assert_equal(answers(result, feeds(LIMIT)), answers(model, feeds(LIMIT)))


def test_unknown_names_are_refused(graph_of: GraphOf) -> None:
    with pytest.raises(FuseError, match=r"no such fusion step: \['qvk'\]; limit: steps: .*qkv"):
        fused(graph_of("bert"), "bert", only=["qvk"])
    with pytest.raises(FuseError, match=r"no such target: 'cuda'; limit: targets: onnxruntime"):
        fused(graph_of("bert"), "bert", target="cuda")
    with pytest.raises(FuseError, match=r"does not take ONNX Attention: 'tensorrt-8\.6'"):
        fused(graph_of("bert"), "bert", target="tensorrt-8.6", only=["attention"])


def test_refused_with_the_pattern_when_nothing_is_merged(graph_of: GraphOf) -> None:
    @dataclass(frozen=True)
    class Idle:
        name: str = "qkv"
        about: str = "does nothing"
        sites: tuple[str, ...] = ("qkv",)

        def apply(self, model: ir.Model, context: Context) -> int:
            return 0

    with pytest.raises(FuseError, match=r"qkv 0 of 3, found 9 separate Q/K/V MatMuls, 0 merged"):
        fused(graph_of("bert"), "bert", steps=[Idle()])


def test_refused_with_the_operator_when_attention_is_of_another_form(graph_of: GraphOf) -> None:
    model = graph_of("bert").clone()
    for node in list(model.graph):
        if node.op_type == "Softmax":  # a value between the product and the softmax that is no scale and no mask
            (value,) = add_node(node, "Tanh", [node.inputs[0]], name=f"{node.name}.cap", like=node.inputs[0])
            node.replace_input_with(0, value)
    with pytest.raises(FuseError, match=r"attention 0 of 3, found 0 recognised cores; in the graph: 3 Softmax"):
        fused(model, "bert")


def test_refused_when_layers_differ(graph_of: GraphOf) -> None:
    with pytest.raises(FuseError, match=r"bert, 4 layers.*qkv 3 of 4.*gelu 3 of 4.*layer_norm 7 of 9"):
        fused(graph_of("bert"), "bert", layers=4)


def test_refused_when_layer_norm_is_in_pieces_and_its_step_is_idle(graph_of: GraphOf) -> None:
    model = graph_of("bert").clone()
    for node in list(model.graph):
        if node.op_type == "Gelu":
            (value,) = add_node(node, "Erf", [node.inputs[0]], name=f"{node.name}.erf", like=node.outputs[0])
            replace(node.outputs[0], value)
    with pytest.raises(FuseError, match=r"gelu 0 of 3, found 3 Erf"):
        fused(model, "bert")


@pytest.mark.parametrize("frozen", ["table", "slice"])
def test_refused_when_positions_are_frozen_at_export_length(graph_of: GraphOf, frozen: str) -> None:
    model = graph_of("bert").clone()
    node = next(node for node in model.graph if node.op_type == "Gather" and "position" in str(node.inputs[0].name))
    table = constant(node.inputs[0])
    assert table is not None
    if frozen == "table":
        value = add_constant(model.graph, "frozen", table[None, :16])
    else:
        bounds = [add_constant(model.graph, f"frozen.{at}", np.array([at], dtype=np.int64)) for at in (0, 16)]
        (value,) = add_node(node, "Slice", [node.inputs[0], *bounds], name="frozen.slice")
        value.shape = ir.Shape([16, table.shape[1]])
    replace(node.outputs[0], value)
    with pytest.raises(FuseError, match=r"positions 0 of 1, found 0 sliced tables.*(frozen at 16|constant length)"):
        fused(model, "bert")


def test_position_table_is_cut_and_holds_the_token_type_when_fused(graph_of: GraphOf) -> None:
    result, _ = fused(graph_of("roberta"), "roberta")
    (node,) = [node for node in result.graph if node.name == "positions.table"]
    table = constant(node.inputs[0])
    assert table is not None
    assert table.shape[0] == LIMIT  # RoBERTa's two rows before the first position are gone
    assert sum(node.op_type == "Gather" for node in result.graph) == 1


def test_relative_table_equals_torch_when_distances_are_far(graph_of: GraphOf) -> None:
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    found = next(relative for node in graph_of("mpnet").graph if (relative := find_relative(node)) is not None)
    distances = torch.arange(-4095, 4096)
    buckets = MPNetEncoder.relative_position_bucket(distances).numpy()
    np.testing.assert_array_equal(found.by_distance(4096), found.table[buckets].T)


def test_run_fails_when_text_is_longer_than_counted_positions(graph_of: GraphOf) -> None:
    result, _ = fused(graph_of("mpnet"), "mpnet", max_length=40)
    assert np.isfinite(answers(result, feeds(LIMIT)[:3])).all()
    with pytest.raises(Exception, match=r"RUNTIME_EXCEPTION|FAIL|INVALID"):
        answers(result, feeds(LIMIT)[3:])


def test_epsilon_stays_when_norm_is_in_pieces(graph_of: GraphOf) -> None:
    # onnxscript.optimizer.optimize drops it: 1e-12 counts as 0 there.
    result, _ = fused(decompose(graph_of("bert")), "bert", only=["clean"])
    assert sum(node.op_type == "Sqrt" for node in result.graph) == 2 * LAYERS + 1
    for node in result.graph:
        if node.op_type == "Sqrt":
            made = node.inputs[0].producer()
            assert made is not None
            assert made.op_type == "Add"
    result, _ = fused(decompose(graph_of("bert")), "bert")
    epsilons = {node.attributes["epsilon"].value for node in result.graph if node.op_type == "LayerNormalization"}
    assert [round(value * 1e12, 3) for value in epsilons] == [1.0]


def test_residual_is_not_taken_for_a_bias_when_norm_has_none(graph_of: GraphOf) -> None:
    model = graph_of("bert").clone()
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    norms[1].resize_inputs(2)
    (value,) = add_node(
        next(iter(norms[1].outputs[0].uses())).node,
        "Add",
        [norms[1].outputs[0], norms[0].outputs[0]],
        name="residual",
        like=norms[1].outputs[0],
    )
    for usage in list(norms[1].outputs[0].uses()):
        if usage.node is not value.producer():
            usage.node.replace_input_with(usage.idx, value)
    result, _ = fused(model, "bert", only=["layer_norm"])
    assert_equal(answers(result, feeds(LIMIT)), answers(model, feeds(LIMIT)))


@dataclass(frozen=True)
class Swap:
    """A planted fault: Q and K of every layer change places in the merged weights."""

    name: str = "swap"
    about: str = "planted"
    sites: tuple[str, ...] = ("qkv",)

    def apply(self, model: ir.Model, context: Context) -> int:
        for node in model.graph:
            if node.op_type == "Split":
                add = node.inputs[0].producer() if node.inputs[0] is not None else None
                product = add.inputs[0].producer() if add is not None and add.inputs[0] is not None else None
                assert product is not None
                weight = constant(product.inputs[1])
                assert weight is not None
                q, k, v = np.split(weight, 3, axis=1)
                swapped = add_constant(model.graph, "swapped", np.concatenate([k, q, v], axis=1))
                product.replace_input_with(1, swapped)
        return 1


def test_swapped_q_and_k_stop_the_build_when_gated(graph_of: GraphOf) -> None:
    seen = []

    def gate(before: ir.Model, after: ir.Model, step: str) -> None:
        seen.append(step)
        difference = np.abs(answers(after, feeds(40)) - answers(before, feeds(40))).max()
        if difference > 2e-5:
            raise FuseError(f"the step {step} changes answers", value=float(difference))

    steps = [*default_steps(), Swap()]
    model = graph_of("bert").clone()
    fuse(model, family="bert", layers=LAYERS, steps=steps)
    assert count_sites(model).sites["qkv"] == LAYERS  # counts alone do not see it
    with pytest.raises(FuseError, match="the step swap changes answers"):
        fuse(graph_of("bert").clone(), family="bert", layers=LAYERS, steps=steps, gate=gate)
    assert seen == ["positions", "qkv", "scale_mask", "swap"]  # a step that changes nothing is not gated


def test_scale_is_folded_once_when_steps_run_twice(graph_of: GraphOf) -> None:
    model, first = fused(graph_of("bert"), "bert", target="tensorrt-10.14")
    again = fuse(model, family="bert", layers=LAYERS, target="tensorrt-10.14")
    assert not any(step.changed for step in again.steps)
    assert again.operators_after == first.operators_after
    assert_equal(answers(model, feeds(LIMIT)), answers(graph_of("bert"), feeds(LIMIT)))
