"""A real plan of the default model on this machine's GPU, against the FP32 graph. `pytest -m gpu`.

TensorRT 8.6 has bindings for Python 3.10 alone, where the tests do not run: there, tests/measurements/h200/visit.py
does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from builders.engine import graph_target
from builders.errors import CompileError
from builders.fuse import fuse
from builders.precision import convert
from builders.serving.lane.tensorrt_engine import TensorRTEngine, TensorRTOptions
from builders.source import EncoderSource
from builders.tensorrt.adapter import ProfileShape, open_tensorrt
from builders.tensorrt.compile import compile_plan
from builders.tensorrt.gpu import find_gpu
from builders.verify.parity import LINES, compare, make_batch, parity_cases
from builders.verify.plan_runner import PlanRunner
from builders.verify.runner import OUTPUT, OnnxRunner

pytestmark = pytest.mark.gpu
BUCKET, BATCH = 128, 32
STREAM = np.random.default_rng(7).integers(1000, 30000, 20000).astype(np.int32)


@pytest.fixture(scope="module")
def runner(
    minilm_onnx: Path, minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlanRunner]:
    if find_gpu() is None:
        pytest.skip("no NVIDIA GPU")
    try:
        tensorrt = open_tensorrt("tensorrt")
    except CompileError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("plan")
    model = ir.load(minilm_onnx)
    fuse(model, family=minilm_source.family, layers=minilm_source.layers, target=graph_target(tensorrt))
    convert(model, "fp16")
    ir.save(model, folder / "model.onnx")
    compiled = compile_plan(
        folder / "model.onnx", [ProfileShape(BUCKET, BATCH)], folder / "model.plan", tensorrt=tensorrt
    )
    with PlanRunner({BUCKET: (compiled.plans[0].path, 0)}, tensorrt=tensorrt) as made:
        yield made


def test_plan_keeps_to_the_fp32_graph_at_every_length(runner: PlanRunner, minilm_onnx: Path) -> None:
    cases = parity_cases({BUCKET: BATCH}, max_tokens=BUCKET * BATCH)
    report = compare(OnnxRunner(ir.load(minilm_onnx)), runner, cases, STREAM, LINES["fp16"])
    assert report.passed, report.summary()


def test_lane_engine_answers_as_the_runner(runner: PlanRunner) -> None:
    path, profile = runner._plans[BUCKET]
    options = TensorRTOptions(profile=profile)
    engine = TensorRTEngine(path, length=BUCKET, steps=(1, 2, 4, 8, 32), output=OUTPUT, options=options)
    engine.seal()
    for case in parity_cases({BUCKET: BATCH}):
        ids, length = make_batch(case, STREAM)
        got = engine.run({"input_ids": ids, "length": length})
        assert np.allclose(got, runner.run(ids, length)[OUTPUT], atol=2e-3), case
    told = engine.metrics()
    assert told["late_allocations_total"] == told["graph_misses_total"] == told["failed_batches_total"] == 0
    engine.close()


def test_padding_up_to_the_bucket_does_not_show(runner: PlanRunner) -> None:
    for case in parity_cases({BUCKET: BATCH}):
        ids, length = make_batch(case, STREAM)
        cut = np.ascontiguousarray(ids[:, : max(case.lengths)])
        assert np.array_equal(runner.run(ids, length)[OUTPUT], runner.run(cut, length)[OUTPUT]), case
