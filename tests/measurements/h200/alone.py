"""Plans and engines in a process of their own, for `visit_serving.py`.

python3.10 -m tests.measurements.h200.alone plan GRAPH PLAN LENGTH BATCH TIMING
python3.10 -m tests.measurements.h200.alone engine PLAN LENGTH BATCH native|none
python3.10 -m tests.measurements.h200.alone loop PLAN LENGTH BATCH native|none
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


def plan(graph: str, out: str, length: str, batch: str, timing: str) -> None:
    """Compile one bucket; `timing` keeps the kernels' times between builds."""
    import builders.tensorrt.compile as compiler
    from builders.tensorrt.adapter import ProfileShape, open_tensorrt

    target = Path(out)
    draft = target.parent / f"build-{target.stem}" / "model.plan"
    draft.parent.mkdir(parents=True, exist_ok=True)
    shape = ProfileShape(int(length), int(batch))
    report = compiler.compile_plan(
        Path(graph), [shape], draft, tensorrt=open_tensorrt("tensorrt"), timing_cache=Path(timing),
        memory_limit_bytes=8 << 30,
    )  # fmt: skip
    made = report.plans[0]
    os.replace(made.path, target)
    memory = (made.profile_memory or (0,))[0]
    kept = ", with kept timings" if report.timings_kept else ""
    print(f"{target.name}: {made.bytes / 1e6:.1f} MB, activations {memory / 1e6:.1f} MB, {made.seconds:.0f} s{kept}")


def engine(path: str, length: str, most: str, native: str) -> None:
    """The engine in this process: milliseconds of a batch and what CUPTI saw, by technique; one JSON a line."""
    from dataclasses import asdict

    from builders.profile.kernels import KernelRecorder, summarise
    from builders.serving.lane.cuda import Cuda
    from builders.serving.lane.tensorrt_engine import TECHNIQUES as ALL
    from builders.serving.lane.tensorrt_engine import TensorRTEngine, TensorRTOptions

    random = np.random.default_rng(5)
    steps = tuple(step for step in (1, 2, 4, 8, 12, 16, 20, 24, 28, 32) if step <= int(most))
    width = int(length)

    def batch(rows: int) -> dict[str, Any]:
        ids = random.integers(1000, 20000, (rows, width)).astype(np.int32)
        return {"input_ids": ids, "length": np.full((rows, 1), width, np.int32)}

    def opened(count: int) -> TensorRTEngine:
        options = TensorRTOptions.read({"techniques": ALL[:count], "native_allocations": native == "native"})
        made = TensorRTEngine(Path(path), length=width, steps=steps, output="EMBEDDING", options=options)
        made.seal()
        return made

    kept = Cuda()  # so that the context outlives each engine
    for count in (4, 2, 1, 0):
        lane = opened(count)
        for rows in (1, steps[-1]):
            part = batch(rows)
            for _ in range(10):
                lane.run(part)
            times = []
            for _ in range(100 if rows == 1 else 50):
                begin = time.perf_counter()
                lane.run(part)
                times.append(time.perf_counter() - begin)
            found: dict[str, Any] = {
                "length": width, "rows": rows, "techniques": list(ALL[:count]),
                "alone_ms": round(float(np.median(times)) * 1000, 4),
            }  # fmt: skip
            if count == 4:
                begin, pending = time.perf_counter(), lane.submit([part])
                for _ in range(100):
                    following = lane.submit([part])
                    lane.collect(pending)
                    pending = following
                lane.collect(pending)
                found["overlapped_ms"] = round((time.perf_counter() - begin) / 101 * 1000, 4)
            print(json.dumps(found), flush=True)
        print(json.dumps({"length": width, "techniques": count, "metrics": lane.metrics()}), flush=True)
        lane.close()
    # After the times, since CUPTI costs some; with engines of their own, since it must be on when a graph is made.
    try:
        recorder = KernelRecorder()
        for count in (4, 2):
            lane = opened(count)
            for rows in (1, steps[-1]):
                run = partial(lane.run, batch(rows))
                seen = [recorder.record(run) for _ in range(20)]
                told = {"length": width, "rows": rows, "graphs": count == 4, **asdict(summarise(seen[2:]))}
                print(json.dumps(told), flush=True)
            lane.close()
    except Exception as error:  # times are worth having without it
        print(json.dumps({"kernels": f"not recorded: {type(error).__name__}: {error}"}), flush=True)
    kept.close()


def loop(path: str, length: str, most: str, native: str) -> None:
    """Say `ready`, wait for a line, run the largest batch for 4 s, print batches a second."""
    from builders.serving.lane.tensorrt_engine import TensorRTEngine, TensorRTOptions

    options = TensorRTOptions.read({"native_allocations": native == "native"})
    rows, width = int(most), int(length)
    lane = TensorRTEngine(Path(path), length=width, steps=(rows,), output="EMBEDDING", options=options)
    ids = np.random.default_rng(5).integers(1000, 20000, (rows, width)).astype(np.int32)
    part = {"input_ids": ids, "length": np.full((rows, 1), width, np.int32)}
    lane.run(part)
    print("ready", flush=True)
    sys.stdin.readline()
    begin, count, pending = time.perf_counter(), 0, lane.submit([part])
    while time.perf_counter() - begin < 4:
        following = lane.submit([part])
        lane.collect(pending)
        pending, count = following, count + 1
    print(count / (time.perf_counter() - begin), flush=True)
    lane.collect(pending)


if __name__ == "__main__":
    {"plan": plan, "engine": engine, "loop": loop}[sys.argv[1]](*sys.argv[2:])
