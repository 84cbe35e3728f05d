"""Load for tests and measurements: closed loop and open loop over one asyncio gRPC connection.

Open loop counts latency from the scheduled time, so a stalled server cannot hide behind a waiting client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException


@dataclass(frozen=True)
class Call:
    """One request: texts, options of `infer` (priority, timeout in us, parameters), start in seconds, entry."""

    texts: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0
    kind: str = ""
    model: str = "encode"


@dataclass(frozen=True)
class Sample:
    """What one call got: latency in seconds, the vectors or the error's text."""

    call: Call
    latency: float
    vectors: np.ndarray | None
    error: str | None


def text_input(texts: Sequence[str | bytes]) -> Any:
    raw = [[text.encode() if isinstance(text, str) else text] for text in texts]
    array = np.array(raw, dtype=np.object_).reshape(len(raw), 1)
    tensor = triton.InferInput("TEXT", [len(raw), 1], "BYTES")
    tensor.set_data_from_numpy(array)
    return tensor


async def _one(client: Any, call: Call, began: float) -> Sample:
    try:
        result = await client.infer(call.model, [text_input(call.texts)], **call.options)
        return Sample(call, time.perf_counter() - began, result.as_numpy("EMBEDDING"), None)
    except InferenceServerException as error:
        return Sample(call, time.perf_counter() - began, None, f"{error.status()}: {error.message()}")


def closed_loop(url: str, calls: Sequence[Call], clients: int) -> tuple[list[Sample], float]:
    """Each client sends its next call when the last one is answered; returns the samples in order and the seconds."""

    async def run() -> tuple[list[Sample], float]:
        samples: list[Sample | None] = [None] * len(calls)
        waiting = iter(range(len(calls)))

        async def client_loop(client: Any) -> None:
            for number in waiting:
                samples[number] = await _one(client, calls[number], time.perf_counter())

        async with triton.InferenceServerClient(url) as client:
            began = time.perf_counter()
            await asyncio.gather(*(client_loop(client) for _ in range(clients)))
            return [sample for sample in samples if sample is not None], time.perf_counter() - began

    return asyncio.run(run())


def open_loop(url: str, calls: Sequence[Call]) -> list[Sample]:
    """Send each call at its own time, whatever the others do."""

    async def run() -> list[Sample]:
        async with triton.InferenceServerClient(url) as client:
            start = time.perf_counter()

            async def at_its_time(call: Call) -> Sample:
                await asyncio.sleep(max(0.0, start + call.at - time.perf_counter()))
                return await _one(client, call, start + call.at)

            return list(await asyncio.gather(*(at_its_time(call) for call in calls)))

    return asyncio.run(run())


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, seconds."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=int(rate * seconds * 2) + 20)
    times = np.cumsum(gaps)
    return [float(at) for at in times[times < seconds]]


def percentile_ms(samples: Sequence[Sample], share: float) -> float:
    """Percentile of the answered calls' latency, milliseconds; NaN when none was answered."""
    answered = [sample.latency for sample in samples if sample.error is None]
    return float(np.percentile(answered, share) * 1000) if answered else float("nan")
