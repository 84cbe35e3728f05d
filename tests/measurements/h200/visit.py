"""Plans of what `prepare.py` wrote, on the GPU: build, parity, latency. Runs under TensorRT 8.6's Python 3.10, too."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import builders.tensorrt.compile as compiler
from builders.tensorrt.adapter import ProfileShape, open_tensorrt
from builders.verify.parity import LINES, ParityCase, compare, describe, make_batch
from builders.verify.plan_runner import PlanRunner
from builders.verify.runner import OUTPUT, Floats, Ids


class Answers:
    """`reference.npz` as the reference runner; also its cases and token stream."""

    def __init__(self, folder: Path, lengths: list[int], *, blocks: bool):
        facts = json.loads((folder / "reference.json").read_text())
        stored = np.load(folder / "reference.npz")
        self.stream: Ids = stored["stream"]
        self.cases: list[ParityCase] = []
        self._answers: dict[bytes, dict[str, Floats]] = {}
        for number, (bucket, *rows) in enumerate(facts["cases"]):
            names = [name for name in facts["blocks"] if f"{number}/{name}" in stored.files]
            if bucket not in lengths or (blocks and not names):
                continue
            case = ParityCase(bucket, tuple(rows))
            ids, length = make_batch(case, self.stream)
            wanted = [*(names if blocks else []), OUTPUT]
            self.cases.append(case)
            self._answers[_key(ids, length)] = {name: stored[f"{number}/{name}"] for name in wanted}

    def run(self, input_ids: Ids, length: Ids) -> dict[str, Floats]:
        """See `builders.verify.runner.Runner`."""
        return self._answers[_key(input_ids, length)]


def _key(ids: Ids, length: Ids) -> bytes:
    return ids.tobytes() + length.tobytes()


@contextmanager
def _weakly_typed(plain: bool) -> Iterator[None]:
    """`plain`: the FP16 flag alone, no layer held to a type."""

    def flag(module: Any, network: Any, config: Any, types: Any) -> int:
        config.set_flag(module.BuilderFlag.FP16)
        return 0

    kept = compiler.hold_types
    compiler.hold_types = flag if plain else kept  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.hold_types = kept


def build(options: argparse.Namespace, shapes: list[ProfileShape], blocks: list[str]) -> None:
    """One plan a bucket, and what TensorRT says of each."""
    with tempfile.TemporaryDirectory() as folder:
        graph = options.folder / f"{options.graph}.onnx"
        if options.blocks:
            model = ir.load(graph)
            values = {value.name: value for node in model.graph for value in node.outputs}
            model.graph.outputs.extend(values[name] for name in blocks)
            graph = Path(folder) / "blocks.onnx"
            ir.save(model, graph)
        with _weakly_typed(options.plain):
            report = compiler.compile_plan(
                graph, shapes, options.plans / f"{options.name}.plan", tensorrt=open_tensorrt("tensorrt"),
                memory_limit_bytes=12 << 30,
            )  # fmt: skip
    for plan in report.plans:
        memory = (plan.profile_memory or (0,))[0]
        print(
            f"{plan.path.name}: {plan.bytes / 1e6:.1f} MB, activations {memory / 1e6:.1f} MB, {plan.seconds:.0f} s, "
            f"{json.dumps(asdict(plan.counts))}",
            flush=True,
        )


def parity(options: argparse.Namespace, runner: PlanRunner, lengths: list[int]) -> None:
    """The worst cosine of EMBEDDING by case, then the gate's own table."""
    answers = Answers(options.folder, lengths, blocks=options.blocks)
    for case in answers.cases:
        ids, length = make_batch(case, answers.stream)
        got = runner.run(ids, length)[OUTPUT].astype(float)
        want = answers.run(ids, length)[OUTPUT].astype(float)
        real = length[:, 0] > 0
        norms = np.linalg.norm(got[real], axis=-1) * np.linalg.norm(want[real], axis=-1)
        cosine = (got[real] * want[real]).sum(-1) / norms
        print(f"{cosine.min():.7f}  {case}  {'all finite' if np.isfinite(got).all() else 'NOT FINITE'}")
    report = compare(answers, runner, answers.cases, answers.stream, LINES["fp16"])
    print("\n".join(describe(report)), report.summary(), sep="\n", flush=True)


def shortened(options: argparse.Namespace, runner: PlanRunner, lengths: list[int]) -> None:
    """Batches of a smaller L than the bucket: the padding that the runner adds must not show."""
    answers = Answers(options.folder, lengths, blocks=options.blocks)
    for case in answers.cases:
        ids, length = make_batch(case, answers.stream)
        width = max(case.lengths)
        whole, cut = runner.run(ids, length), runner.run(np.ascontiguousarray(ids[:, :width]), length)
        shapes = {array.shape[1] for array in cut.values() if array.ndim == 3}
        print(f"L {width}: largest difference {np.abs(whole[OUTPUT] - cut[OUTPUT]).max():.3g}, block widths {shapes}")


def latency(options: argparse.Namespace, runner: PlanRunner, largest: dict[int, int], vocabulary: int) -> None:
    """Milliseconds of a run, without and with a CUDA graph: median by CUDA events, twice each."""
    random, cuda = np.random.default_rng(5), runner.cuda
    first, last = cuda.call("cuEventCreate", 0), cuda.call("cuEventCreate", 0)

    def median(go: Callable[[], Any], count: int) -> float:
        times = []
        for _ in range(count):
            cuda.call("cuEventRecord", first, cuda.stream)
            go()
            cuda.call("cuEventRecord", last, cuda.stream)
            cuda.call("cuEventSynchronize", last)
            times.append(cuda.call("cuEventElapsedTime", first, last))
        return float(np.median(times))

    relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
    for length, most in largest.items():
        for size in (size for size in options.sizes if size <= most):
            ids = random.integers(0, vocabulary, (size, length)).astype(np.int32)
            runner.run(ids, np.full((size, 1), length, np.int32))
            count = 300 if size * length <= 4096 else 80
            for _ in range(20):
                runner.repeat()
            cuda.wait()
            plain = [median(runner.repeat, count) for _ in range(2)]
            cuda.call("cuStreamBeginCapture", cuda.stream, cuda.enum("CUstreamCaptureMode", relaxed))
            runner.repeat()
            graph = cuda.call("cuGraphInstantiate", cuda.call("cuStreamEndCapture", cuda.stream), 0)
            for _ in range(20):
                cuda.call("cuGraphLaunch", graph, cuda.stream)
            cuda.wait()
            graphed = [
                median(lambda graph=graph: cuda.call("cuGraphLaunch", graph, cuda.stream), count) for _ in range(2)
            ]
            print(f"{size} x {length}: {min(plain):.3f} ms, CUDA graph {min(graphed):.3f} ms", flush=True)


def once(runner: PlanRunner, length: int, size: int) -> None:
    """One run between the profiler's start and stop, after three others: for `ncu --profile-from-start off`."""
    ids = np.random.default_rng(5).integers(1, 20000, (size, length)).astype(np.int32)
    for _ in range(3):
        runner.run(ids, np.full((size, 1), length, np.int32))
    runner.cuda.call("cuProfilerStart")
    runner.repeat()
    runner.cuda.wait()
    runner.cuda.call("cuProfilerStop")


def main() -> None:
    """See `--help` and README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["build", "parity", "shortened", "latency", "once"])
    parser.add_argument("--folder", type=Path, required=True, help="of prepare.py")
    parser.add_argument("--plans", type=Path, required=True, help="folder of the plans")
    parser.add_argument("--graph", default="fused", help="NAME of NAME.onnx")
    parser.add_argument("--plain", action="store_true", help="FP16 flag alone; for the graph `fp32`")
    parser.add_argument("--blocks", action="store_true", help="block outputs marked as outputs of the plan")
    parser.add_argument("--buckets", nargs="+", type=int, help="some of the prepared ones")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1, 32], help="texts of a batch for latency; once: first"
    )
    options = parser.parse_args()
    facts = json.loads((options.folder / "reference.json").read_text())
    largest = {int(length): batch for length, batch in facts["buckets"].items()}
    lengths = options.buckets or sorted(largest)
    options.name = options.graph + ("_plain" if options.plain else "") + ("_blocks" if options.blocks else "")
    options.plans.mkdir(parents=True, exist_ok=True)
    if "build" in options.what:
        build(options, [ProfileShape(length, largest[length]) for length in lengths], facts["blocks"])
    if options.what == ["build"]:
        return
    plans = {length: (options.plans / f"{options.name}_{length}.plan", 0) for length in lengths}
    with PlanRunner(plans) as runner:
        if "parity" in options.what:
            parity(options, runner, lengths)
        if "shortened" in options.what:
            shortened(options, runner, lengths)
        if "latency" in options.what:
            latency(options, runner, {length: largest[length] for length in lengths}, facts["vocabulary"])
        if "once" in options.what:
            once(runner, lengths[0], options.sizes[0])


if __name__ == "__main__":
    main()
