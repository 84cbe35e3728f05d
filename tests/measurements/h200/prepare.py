"""Graphs, batches and FP32 answers for `visit.py`; needs the project's `build` packages and no GPU."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from builders.export import export_onnx
from builders.fuse import default_steps, fuse
from builders.precision import Precision, convert
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.verify.parity import make_batch, parity_cases
from builders.verify.runner import OnnxRunner
from tests.measurements.h200.seeded import write_model

TARGET = "tensorrt-8.6"


def variant(
    onnx: Path, source: EncoderSource, out: Path, name: str, precision: Precision, only: Sequence[str] = ()
) -> None:
    """Write NAME.onnx."""
    start = time.perf_counter()
    model = ir.load(onnx)
    report = fuse(model, family=source.family, layers=source.layers, target=TARGET, only=only, max_length=4096)
    convert(model, precision)
    ir.save(model, out / f"{name}.onnx")
    print(f"{name}: {report.nodes_after} nodes, {time.perf_counter() - start:.0f} s", flush=True)


def reference(
    onnx: Path, source: EncoderSource, out: Path, buckets: Mapping[int, int], max_tokens: int, vocabulary: int
) -> None:
    """Answers of the FP32 graph to every batch, block outputs for the small batches of the shortest bucket."""
    model = ir.load(onnx)
    report = fuse(model, family=source.family, layers=source.layers, target=TARGET, max_length=4096)
    runner = OnnxRunner(model, {block.name: block.value for block in report.blocks[:-1]})
    stream = np.random.default_rng(7).integers(0, vocabulary, 20000).astype(np.int32)
    found, cases = {"stream": stream}, []
    for number, case in enumerate(parity_cases(buckets, batches=(2, 5), max_tokens=max_tokens)):
        answer = runner.run(*make_batch(case, stream))
        deep = case.bucket == min(buckets) and len(case.lengths) <= 5
        cases.append([case.bucket, *case.lengths])
        found |= {f"{number}/{name}": array for name, array in answer.items() if deep or name == "EMBEDDING"}
        print(f"FP32: {case}", flush=True)
    np.savez(out / "reference.npz", **found)
    facts = {
        "buckets": buckets,
        "cases": cases,
        "blocks": [block.value for block in report.blocks[:-1]],
        "vocabulary": vocabulary,
        "model": source.folder.name,
    }
    (out / "reference.json").write_text(json.dumps(facts))


def main() -> None:
    """See `--help` and README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="as model.source in deploy.yaml; left out, BERT-base with seeded weights")
    parser.add_argument("--std", type=float, default=0.05, help="of the seeded weights")
    parser.add_argument("--tiny", action="store_true", help="a small seeded model, to try the scripts")
    parser.add_argument("--buckets", nargs="+", default=["128:32", "256:32", "512:32", "1024:16", "2048:8"])
    parser.add_argument("--max-tokens", type=int, default=16384, help="largest mixed batch of parity, padded tokens")
    parser.add_argument("--without", nargs="*", default=[], help="fusion steps; a graph without each")
    parser.add_argument(
        "--with-qkv",
        action="store_true",
        help="also a graph with Q, K, V merged, which 8.6 leaves out by default; --without is then taken from it",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    buckets = {int(length): int(batch) for length, batch in (pair.split(":") for pair in options.buckets)}
    place = options.model or str(write_model(options.out / "model", options.std, tiny=options.tiny))
    source = open_source(ModelSettings(source=place, max_tokens=max(buckets)))
    onnx = options.out / "exported.onnx"
    print(f"exported: cosine to torch {export_onnx(source, onnx).least_cosine}", flush=True)
    variant(onnx, source, options.out, "fused", "fp16")
    variant(onnx, source, options.out, "fp32", "fp32")
    steps = [step.name for step in default_steps(TARGET)]
    if options.with_qkv:
        steps.append("qkv")
        variant(onnx, source, options.out, "with-qkv", "fp16", steps)
    for step in options.without:
        variant(onnx, source, options.out, f"without-{step}", "fp16", [name for name in steps if name != step])
    vocabulary = len(json.loads((source.folder / "tokenizer.json").read_text())["model"]["vocab"])
    reference(onnx, source, options.out, buckets, options.max_tokens, vocabulary)


if __name__ == "__main__":
    main()
