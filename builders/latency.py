"""What a version's buckets take, measured when it is built: one text, and a full batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from builders.bucket import Bucket, BucketPlan
from builders.contract import Contract
from builders.machine import processor_name
from builders.manifest import BucketTime, Latency
from builders.serving.entry.group import LaneInputs
from builders.settings import DeploySettings

#: Runs of each that are timed, and the time that is given to them; at least one, whatever it takes.
RUNS, BUDGET_S = 5, 0.3
#: A batch that would take longer is not run.
LONGEST_S = 2.0

#: Runs one batch of a bucket, waited for.
Run = Callable[[Bucket, LaneInputs], object]


def measure(plan: BucketPlan, contract: Contract, run: Run, how: str) -> Latency:
    """Time every bucket with texts that fill it, one and as many as it takes.

    Args:
        plan: the buckets.
        contract: the lanes' tensors.
        run: the engine.
        how: what is run and where, for people.
    """
    times = []
    for bucket in plan.buckets:
        one = _median(partial(run, bucket, _texts(contract, bucket, 1)))
        batch = None
        if bucket.batch > 1 and one * bucket.batch <= LONGEST_S:
            batch = _median(partial(run, bucket, _texts(contract, bucket, bucket.batch)))
        times.append(
            BucketTime(
                length=bucket.length,
                batch=bucket.batch,
                one_ms=round(one * 1000, 3),
                batch_ms=None if batch is None else round(batch * 1000, 3),
            )
        )
    return Latency(how=how, buckets=tuple(times))


def measure_graph(path: Path, settings: DeploySettings, plan: BucketPlan, contract: Contract) -> Latency:
    """Time a graph with the engine that the lanes have on a CPU, with each lane's own threads."""
    # Loading ONNX Runtime takes a moment, and not every command needs it.
    from builders.serving.lane.onnx_engine import OnnxEngine

    threads = {"short": settings.lanes.short.threads, "long": settings.lanes.long.threads}
    engines = {
        number: OnnxEngine(path, output=contract.output, per_token=contract.per_token, threads=number)
        for number in set(threads.values())
    }
    used = " and ".join(map(str, sorted(engines)))
    how = f"ONNX Runtime, threads: {used}, {processor_name()}"
    return measure(plan, contract, lambda bucket, inputs: engines[threads[bucket.lane]].run(inputs), how)


def measure_plans(plans: Mapping[int, tuple[Path, int]], plan: BucketPlan, contract: Contract, gpu: str) -> Latency:
    """Time plans on the GPU with the gate's runner, which copies in and out and has no CUDA graphs.

    Args:
        plans: bucket length -> plan file and number of the bucket's profile in it.
        plan: the buckets.
        contract: the lanes' tensors.
        gpu: its name.
    """
    from builders.verify.plan_runner import PlanRunner

    with PlanRunner(plans) as runner:
        how = f"TensorRT, copies included, without CUDA graphs, {gpu}"
        return measure(plan, contract, lambda bucket, inputs: runner.run(*inputs.values()), how)


def _texts(contract: Contract, bucket: Bucket, number: int) -> LaneInputs:
    """Texts of the bucket's length; of which tokens does not matter to the time."""
    length = np.full((number, 1), bucket.length, dtype=np.int32)
    tensors = {"input_ids": np.ones((number, bucket.length), dtype=np.int32), "length": length}
    return tensors | {"segment_start": length} if contract.segment else tensors


def _median(run: Callable[[], object]) -> float:
    """Seconds of a run, the first one left out."""
    run()
    times: list[float] = []
    while not times or (len(times) < RUNS and sum(times) < BUDGET_S):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
