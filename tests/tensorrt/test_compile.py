"""Plans of the default model, really built with TensorRT-RTX; it needs no GPU to build."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from builders.errors import CompileError, ExportError
from builders.fuse import fuse
from builders.graph_file import load_graph, save_graph
from builders.precision import convert
from builders.tensorrt.adapter import ProfileShape, TensorRT
from builders.tensorrt.compile import CompileReport, compile_plan
from builders.tensorrt.layers import Fused
from tests.tensorrt.graphs import attention_graph

PROFILES = tuple(ProfileShape(length, 32) for length in (128, 256, 512))


class Built:
    def __init__(self, onnx: Path, folder: Path, rtx: TensorRT):
        self.steps: list[tuple[str, int, int]] = []
        self.path = folder / "model.plan"
        self.report: CompileReport = compile_plan(
            onnx, PROFILES, self.path, tensorrt=rtx, memory_limit_bytes=4 << 30, timing_cache=folder / "timings",
            progress=lambda *step: self.steps.append(step),
        )  # fmt: skip


@pytest.fixture(scope="module")
def built(minilm_fp16: Path, rtx: TensorRT, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(minilm_fp16, tmp_path_factory.mktemp("plan"), rtx)


def test_plan_is_written_when_all_buckets_are_built_in_fp16(built: Built) -> None:
    (plan,) = built.report.plans
    assert plan.profiles == PROFILES
    assert plan.path == built.path
    content = built.path.read_bytes()
    assert (plan.bytes, plan.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert 40e6 < plan.bytes < 90e6  # 45 MB of FP16 weights, FP32 would be 90
    assert [path.name for path in built.path.parent.iterdir()] == ["model.plan"]  # no draft, no timings of RTX
    assert built.report.fingerprint["tensorrt"] == "rtx"
    assert built.report.warnings == ()


def test_every_fusion_is_in_the_listing_of_every_profile(built: Built) -> None:
    (plan,) = built.report.plans
    assert plan.listing.profiles == (0, 1, 2)
    counts = plan.counts
    assert (counts.attention, counts.qkv, counts.gelu_bias) == (Fused(6, 6), Fused(6, 6), Fused(6, 6))
    assert counts.layer_norm_residual == Fused(13, 13)
    # Three products a layer (QKV, projection, second of the feed-forward) and the first with its GELU.
    kinds = plan.listing.kinds()
    assert kinds["gemm"] == 3 * 6 * 3
    assert kinds["runtime_fusion"] == 3 * 6


def test_norms_have_fp32_statistics_and_products_are_fp16_when_listed(built: Built) -> None:
    layers = built.report.plans[0].listing.layers
    norms = [layer for layer in layers if "MeanSubMulMean" in layer.name]
    assert len(norms) == 13 * 3
    assert all("CastMeanSubMulMean" in layer.name for layer in norms)  # a Cast to FP32 before the first sum
    assert {layer.types for layer in layers if layer.kind == "gemm"} == {("Half",)}
    attention = [layer for layer in layers if any("softmax" in node for node in layer.nodes)]
    assert all("mha" in layer.name and layer.types == ("Half",) for layer in attention)


def test_progress_is_told_when_building(built: Built) -> None:
    assert built.steps
    assert all(0 <= done <= total for _, done, total in built.steps)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_attention_operator_is_one_kernel_when_compiled(precision: str, rtx: TensorRT, tmp_path: Path) -> None:
    model = attention_graph()
    convert(model, precision)  # type: ignore[arg-type]
    ir.save(model, tmp_path / "model.onnx")
    report = compile_plan(tmp_path / "model.onnx", [ProfileShape(16, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert report.lowered.expanded == {}
    assert report.plans[0].counts.attention == Fused(1, 1)


def test_attention_is_written_out_and_said_so_when_no_kernel_fits(rtx: TensorRT, tmp_path: Path) -> None:
    ir.save(attention_graph(), tmp_path / "model.onnx")  # FP32
    report = compile_plan(tmp_path / "model.onnx", [ProfileShape(16, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert report.plans[0].counts.attention == Fused(0, 1)


def test_plan_stays_when_graph_cannot_be_read(rtx: TensorRT, tmp_path: Path) -> None:
    model = attention_graph()
    next(node for node in model.graph if node.op_type == "ReduceMean").op_type = "NoSuchOperator"
    ir.save(model, tmp_path / "model.onnx")
    (tmp_path / "model.plan").write_bytes(b"before")
    with pytest.raises(CompileError, match=r"cannot read the graph.*in NoSuchOperator pool"):
        compile_plan(tmp_path / "model.onnx", [ProfileShape(16, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert (tmp_path / "model.plan").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.plan"]


def test_plan_stays_when_profile_does_not_fit_the_graph(rtx: TensorRT, tmp_path: Path) -> None:
    ir.save(attention_graph(), tmp_path / "model.onnx")  # made for 16 tokens
    with pytest.raises(CompileError, match=r"made no plan.*17"):
        compile_plan(tmp_path / "model.onnx", [ProfileShape(17, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert not (tmp_path / "model.plan").exists()


def test_plan_holds_the_weights_when_they_lie_beside_the_graph(
    small_onnx: Path, small_external: Path, rtx: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(small_external.parent, tmp_path / "moved") / "model.onnx"
    reports = {}
    for name, path, above in (("inside", small_onnx, 10**9), ("beside", moved, 0)):
        monkeypatch.setattr("builders.tensorrt.compile.EXTERNAL_ABOVE", above)
        model = load_graph(path)
        fuse(model, family="bert", layers=3, target="tensorrt-rtx")
        ShapeInferencePass()(model)
        convert(model, "fp16")
        graph = save_graph(model, tmp_path / name / "graph.onnx", external_above=above)
        plan = graph.with_name("model.plan")
        reports[name] = compile_plan(graph, [ProfileShape(16, 4), ProfileShape(64, 2)], plan, tensorrt=rtx)
        assert ".data" in graph.read_bytes().decode("latin-1") or name == "inside"
    (inside,), (beside,) = reports["inside"].plans, reports["beside"].plans
    assert beside.counts == inside.counts
    assert beside.listing == inside.listing
    # The same constants are in both: a plan without its weights would be a tenth of it.
    assert beside.bytes == pytest.approx(inside.bytes, rel=0.01)
    assert sorted(path.name for path in (tmp_path / "beside").iterdir()) == [
        "graph.onnx",
        "graph.onnx.data",
        "model.plan",
    ]


def test_weights_are_lowered_with_the_graph_when_it_is_written_into_one_file(
    small_external: Path, rtx: TensorRT, tmp_path: Path
) -> None:
    report = compile_plan(small_external, [ProfileShape(16, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert report.plans[0].bytes > 100_000


def test_refused_when_the_data_beside_the_graph_is_missing(small_external: Path, rtx: TensorRT, tmp_path: Path) -> None:
    graph = Path(shutil.copy(small_external, tmp_path))
    with pytest.raises(ExportError, match=r"data cannot be read.*model\.onnx\.data"):
        compile_plan(graph, [ProfileShape(16, 4)], tmp_path / "model.plan", tensorrt=rtx)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("profiles", [[], [ProfileShape(16, 0)], [ProfileShape(16, 1), ProfileShape(16, 2)]])
def test_refused_when_profiles_cannot_be(profiles: list[ProfileShape], tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="profiles that cannot be"):
        compile_plan(tmp_path / "model.onnx", profiles, tmp_path / "model.plan")
