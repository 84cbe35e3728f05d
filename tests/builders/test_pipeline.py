"""The whole build: steps counted, judged, published and reported; a bad step stops it.

On the default model where its numbers are looked at, else on a tiny one of the same kind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from builders.bucket import BucketPlan
from builders.build import BuildOptions, build, graph_cache
from builders.errors import BuilderError, ExportError, ManifestError
from builders.fuse import Context, Step, pipeline
from builders.graph import runner_of
from builders.graph_file import load_graph
from builders.manifest import Machine, read_manifest
from builders.render import facts_of_manifest
from builders.settings import DeploySettings, load_settings
from builders.source import open_source
from builders.tensorrt.adapter import ProfileShape
from builders.tensorrt.compile import CompileReport, PlanReport
from builders.tensorrt.layers import Fused, LayerCounts, LayerListing
from builders.tensorrt.lower import LowerReport
from builders.verification import run_plan, run_verify
from builders.verify.gate import GateError
from builders.verify.report import read_report
from tests.texts import mixed_texts
from tests.tools.repositories import CACHE, settings_file
from tests.tools.tiny import LIMIT, tiny_model

STEPS = ("layer_norm", "gelu", "clean", "positions", "qkv", "scale_mask")


def deployed(folder: Path, **model: Any) -> DeploySettings:
    """Two short buckets, so that the gate takes seconds."""
    model = {"max_tokens": LIMIT, "tile_positions": None, **model}
    return load_settings(settings_file(folder, "deploy.cpu.yaml", buckets=[16, LIMIT], model=model))


@pytest.fixture
def minilm(tmp_path: Path) -> DeploySettings:
    return deployed(tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "embedding")


@pytest.fixture
def deployment(tiny: Path, tmp_path: Path) -> DeploySettings:
    """A BERT of two small layers."""
    return deployed(tmp_path, source=str(tiny))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small retrieval set of the user's: the beginning of a text finds the whole."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"query": text[: len(text) // 2], "positive": text} for text in mixed_texts(60, seed=8)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The graphs of all tests, but reports of its own beside it: those are named by the second of their build."""
    CACHE.mkdir(parents=True, exist_ok=True)
    link = tmp_path / "work" / "cache"
    link.parent.mkdir()
    link.symlink_to(CACHE)
    return link


class StretchNorm:
    """A step gone wrong: the counts are right, the answers are not."""

    name, about, sites = "planted", "stretches one channel of the first norm", ()

    def apply(self, model: ir.Model, _: Context) -> int:
        norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
        scale = norm.inputs[1]
        stretched = scale.const_value.numpy().copy()
        stretched[7] *= 30
        scale.const_value = ir.tensor(stretched, name=scale.name)
        return 1


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Step:
    """The bad step between the merged QKV and the scale."""
    step: Any = StretchNorm()
    names = [own.name for own in pipeline._STEPS]
    place = names.index("qkv") + 1
    monkeypatch.setattr(pipeline, "_STEPS", (*pipeline._STEPS[:place], step, *pipeline._STEPS[place:]))
    return step


def test_version_published_with_its_steps_accuracy_and_report(minilm: DeploySettings, data: Path, cache: Path) -> None:
    said: list[str] = []
    result = build(minilm, cache, said.append, BuildOptions(data=data))
    manifest = read_manifest(result.repository, result.version)
    assert manifest.steps == STEPS
    (row,) = manifest.accuracy
    assert row.metric.startswith("retrieval recall@1")
    assert row.loss <= row.limit == 0.005
    assert manifest.latency is not None
    assert "ONNX Runtime" in manifest.latency.how
    assert [time.length for time in manifest.latency.buckets] == [bucket.length for bucket in manifest.buckets]
    assert all(time.one_ms > 0 for time in manifest.latency.buckets)
    assert result.report is not None
    report = read_report(result.report)
    found = {step.name: (step.found, step.expected) for step in report.steps}
    assert found["qkv"] == (12, 12)  # 6 products and 6 cores
    assert found["layer_norm"] == (13, 13)
    assert found["gelu"] == (6, 6)
    assert report.gate is not None
    assert report.gate.passed
    assert "<svg" in (result.report / "report.html").read_text(encoding="utf-8")
    assert not build(minilm, cache, said.append, BuildOptions(data=data)).built


def test_build_stopped_at_once_when_a_step_changes_the_answers(
    deployment: DeploySettings, data: Path, planted: Step
) -> None:
    with pytest.raises(GateError, match="step planted fails the accuracy gate"):
        build(deployment, CACHE, lambda _: None, BuildOptions(data=data))
    assert not list(deployment.repository.glob("*/1"))


@pytest.mark.parametrize("model", ["deployment", pytest.param("minilm", marks=pytest.mark.slow)])
def test_verify_fails_and_names_the_step_when_one_is_bad(
    model: str, data: Path, planted: Step, request: pytest.FixtureRequest
) -> None:
    checked = run_verify(request.getfixturevalue(model), CACHE, lambda _: None, data=data, find=True)
    assert not checked.report.passed
    assert checked.bisect is not None
    assert any("planted" in cause.steps for cause in checked.bisect.causes)


def test_verify_holds_for_fp16(minilm: DeploySettings, data: Path) -> None:
    checked = run_verify(minilm, CACHE, lambda _: None, data=data, precision="fp16")
    assert checked.report.passed, checked.report.reasons
    assert 0.9998 <= checked.report.parity.worst.cosine < 1.0


def test_given_graph_enters_at_fuse(minilm: DeploySettings, data: Path, minilm_onnx: Path) -> None:
    result = build(minilm, CACHE, lambda _: None, BuildOptions(onnx=minilm_onnx, data=data, gate=False))
    assert read_manifest(result.repository, result.version).export["onnx"] == minilm_onnx.name


def test_given_graph_refused_when_it_has_not_the_contract(deployment: DeploySettings, tmp_path: Path) -> None:
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    node = ir.node("Identity", [value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", value.type, value.shape
    other = tmp_path / "other.onnx"
    ir.save(ir.Model(ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 20}), ir_version=10), other)
    with pytest.raises(ExportError, match="has not the lanes' contract"):
        build(deployment, CACHE, lambda _: None, BuildOptions(onnx=other))
    with pytest.raises(ExportError, match="no such ONNX file"):
        build(deployment, CACHE, lambda _: None, BuildOptions(onnx=tmp_path / "none.onnx"))


@pytest.mark.parametrize("options", [BuildOptions(only=("qvk",)), BuildOptions(skip=("nothing",))])
def test_unknown_step_refused_with_the_known_ones(deployment: DeploySettings, options: BuildOptions) -> None:
    with pytest.raises(BuilderError, match="limit: steps: layer_norm, gelu, clean"):
        build(deployment, CACHE, lambda _: None, options)


def test_plan_of_production_built_by_rtx_with_every_fusion(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    production = load_settings(Path("deploy.yaml"))
    lines = list(run_plan(production, CACHE, lambda _: None, "rtx", tmp_path))
    text = "\n".join(lines)
    assert "buckets 128, 256, 512, 1024, 2048" in text
    for fused in ("attention 6/6", "layer norm with residual 13/13", "GELU with bias 6/6", "merged QKV 6/6"):
        assert fused in text


def test_skipped_step_leaves_its_sites_apart(deployment: DeploySettings, data: Path) -> None:
    result = build(deployment, CACHE, lambda _: None, BuildOptions(skip=("qkv",), data=data, gate=False))
    assert "qkv" not in read_manifest(result.repository, result.version).steps


def test_damaged_version_is_not_up_to_date(deployment: DeploySettings) -> None:
    first = build(deployment, CACHE, lambda _: None, BuildOptions(gate=False))
    graph = first.repository / "encoder_16" / str(first.version) / "model.onnx"
    # Another file: the lanes' are links to one.
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 0xFF
    graph.unlink()
    graph.write_bytes(content)
    again = build(deployment, CACHE, lambda _: None, BuildOptions(gate=False))
    assert again.built
    assert again.version == first.version + 1


def test_data_is_read_before_anything_else(deployment: DeploySettings, data: Path, tmp_path: Path) -> None:
    build(deployment, CACHE, lambda _: None, BuildOptions(data=data))
    with pytest.raises(BuilderError, match=r"none\.csv"):
        build(deployment, CACHE, lambda _: None, BuildOptions(data=tmp_path / "none.csv"))


def test_version_judged_again_when_the_data_change(deployment: DeploySettings, data: Path, tmp_path: Path) -> None:
    first = build(deployment, CACHE, lambda _: None, BuildOptions(data=data))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(data.read_text(encoding="utf-8").splitlines()[:40]), encoding="utf-8")
    second = build(deployment, CACHE, lambda _: None, BuildOptions(data=other))
    assert (second.built, second.version) == (True, first.version + 1)


def test_failed_gate_leaves_a_report(deployment: DeploySettings, data: Path, planted: Step, cache: Path) -> None:
    with pytest.raises(GateError):
        build(deployment, cache, lambda _: None, BuildOptions(data=data))
    (folder,) = (cache.parent / "reports").iterdir()
    report = read_report(folder)
    assert report.version is None
    assert report.gate is not None
    assert not report.gate.passed


def test_damaged_reference_is_exported_again(deployment: DeploySettings, tmp_path: Path) -> None:
    build(deployment, CACHE, lambda _: None, BuildOptions(gate=False))
    cache, source = tmp_path / "cache", open_source(deployment.model)
    (exported,) = graph_cache(CACHE).glob(f"{source.sha256[:12]}-fp32")
    shutil.copytree(exported, graph_cache(cache) / exported.name)
    (reference,) = cache.glob("*/*-fp32/model.onnx")
    content = bytearray(reference.read_bytes())
    content[len(content) // 2] ^= 0xFF
    reference.write_bytes(content)
    said: list[str] = []
    build(deployment, cache, said.append, BuildOptions(gate=False, skip=("clean",)))
    assert any(line.startswith("exporting") for line in said)
    said.clear()
    build(deployment, cache, said.append, BuildOptions(gate=False, skip=("gelu",)))
    assert not any(line.startswith("exporting") for line in said), "it is whole now"


def test_version_of_another_engine_not_rendered(deployment: DeploySettings) -> None:
    result = build(deployment, CACHE, lambda _: None, BuildOptions(gate=False))
    manifest = read_manifest(result.repository, result.version)
    with pytest.raises(ManifestError, match="'onnxruntime'; limit: tensorrt"):
        facts_of_manifest(native(deployment), manifest)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU and TensorRT 8.6 in all but the compiler: one plan a bucket, run as the graph would be."""
    machine = Machine(gpu="NVIDIA H200", compute_capability="9.0", tensorrt="8.6.0")
    state: dict[str, Any] = {"graph": None, "plans": None, "spoil": 1.0}

    def compiled(settings: DeploySettings, plan: BucketPlan, graph: Path, *_: object) -> CompileReport:
        state["graph"] = load_graph(graph)
        counts = LayerCounts(4, 1, Fused(0, 6), Fused(0, 13), Fused(0, 6), Fused(0, 6))
        plans = []
        for bucket in plan.buckets:
            path = graph.with_name(f"model_{bucket.length}.plan")
            path.write_text(f"plan of {bucket.length}", encoding="utf-8")
            shape = ProfileShape(bucket.length, bucket.batch)
            plans.append(PlanReport(path, "0", 9, (shape,), 1.0, counts, LayerListing(()), "inspector", (1000,), 1000))
        return CompileReport({}, tuple(plans), LowerReport(17, {}), (), False, 1.0)

    class Runner:
        def __init__(self, plans: dict[int, tuple[Path, int]]):
            state["plans"] = plans
            self._runner = runner_of(state["graph"], "fp16")

        def __enter__(self) -> Runner:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, input_ids: Any, length: Any) -> Any:
            answers = dict(self._runner.run(input_ids, length))
            answers["EMBEDDING"] = answers["EMBEDDING"].copy()
            answers["EMBEDDING"][:, 0] *= state["spoil"]
            return answers

    monkeypatch.setattr("builders.build.target_of", lambda _: "tensorrt-8.6")
    monkeypatch.setattr("builders.build.this_machine", lambda: machine)
    monkeypatch.setattr("builders.engine.this_machine", lambda: machine)
    monkeypatch.setattr("builders.engine._compile", compiled)
    monkeypatch.setattr("builders.engine.PlanRunner", Runner)
    monkeypatch.setattr("builders.verify.plan_runner.PlanRunner", Runner)  # for the times of the buckets
    return state


def native(settings: DeploySettings) -> DeploySettings:
    engine = settings.engine.model_copy(update={"kind": "tensorrt", "precision": "fp16"})
    return settings.model_copy(update={"engine": engine})


def test_plans_published_for_tritons_own_backend(
    minilm: DeploySettings, data: Path, cache: Path, gpu: dict[str, Any]
) -> None:
    result = build(native(minilm), cache, lambda _: None, BuildOptions(data=data))
    manifest = read_manifest(result.repository, result.version)
    assert manifest.steps == ("layer_norm", "gelu", "clean", "positions", "scale_mask", "fp16")
    assert str(manifest.machine) == "NVIDIA H200 (compute capability 9.0), TensorRT 8.6.0"
    assert [(bucket.length, bucket.index) for bucket in manifest.buckets] == [(16, 0), (LIMIT, 0)]
    assert sorted(gpu["plans"]) == [16, LIMIT]
    for length in (16, LIMIT):
        folder = result.repository / f"encoder_{length}"
        # The Python engine's code lies beside the plan, so that engine.backend can change without a build.
        there = {path.name for path in (folder / str(result.version)).iterdir()}
        assert there == {"model.plan", "model.py", "lanes_lane", "__pycache__"}
        assert (folder / str(result.version) / "model.plan").read_text(encoding="utf-8") == f"plan of {length}"
        assert 'profile: "0"' in (folder / "config.pbtxt").read_text(encoding="utf-8")
    assert result.report is not None
    assert (result.report / "model_64.layers.json").exists()


def test_plan_not_published_when_it_answers_otherwise_than_its_graph(
    deployment: DeploySettings, data: Path, gpu: dict[str, Any]
) -> None:
    gpu["spoil"] = 30.0
    with pytest.raises(GateError, match="the plan fails the accuracy gate"):
        build(native(deployment), CACHE, lambda _: None, BuildOptions(data=data))
    assert not list(deployment.repository.glob("encode/[0-9]*"))


def test_plan_of_another_machine_is_another_version(
    deployment: DeploySettings, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = native(deployment)
    first = build(settings, CACHE, lambda _: None, BuildOptions(gate=False))
    other = Machine(gpu="NVIDIA A100", compute_capability="8.0", tensorrt="8.6.0")
    monkeypatch.setattr("builders.build.this_machine", lambda: other)
    second = build(settings, CACHE, lambda _: None, BuildOptions(gate=False))
    assert (second.built, second.version) == (True, first.version + 1)
