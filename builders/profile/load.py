"""A closed loop of mixed texts for a profile, over one asyncio gRPC connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

WORDS = ("queue", "batch", "token", "window", "lane", "priority", "latency", "request", "answer", "model", "memory")
SHARES = (0.65, 0.20, 0.15)
"""Of texts up to a quarter, a half and all of the longest bucket."""


@dataclass(frozen=True)
class Latencies:
    """What was measured: seconds by class of length, and the errors by their text."""

    by_class: Mapping[str, Sequence[float]]
    errors: Mapping[str, int]
    seconds: float

    @property
    def all(self) -> list[float]:
        """Every latency, seconds."""
        return [value for values in self.by_class.values() for value in values]


def mixed_texts(longest: int, number: int, seed: int = 3) -> dict[str, list[str]]:
    """Texts of three classes up to `longest` tokens; a word of WORDS is about one token, two more are special."""
    random = np.random.default_rng(seed)
    bounds = (2, max(4, longest // 4), max(6, longest // 2), max(8, longest))
    found = {}
    for least, most in pairwise(bounds):
        sizes = random.integers(max(1, least - 1), max(2, most - 2) + 1, number)
        found[f"up to {most}"] = [" ".join(random.choice(WORDS, size)) for size in sizes]
    return found


def closed_loop(
    grpc_url: str, model: str, texts: Mapping[str, Sequence[str]], *, clients: int, seconds: float
) -> Latencies:
    """Keep `clients` single-text requests in flight for `seconds`.

    Args:
        grpc_url: `host:port`.
        model: the entry to ask.
        texts: class name to texts; classes are drawn by SHARES.
        clients: requests in flight.
        seconds: how long.
    """
    return asyncio.run(_run(grpc_url, model, texts, clients, seconds))


async def _run(url: str, model: str, texts: Mapping[str, Sequence[str]], clients: int, seconds: float) -> Latencies:
    random = np.random.default_rng(4)
    names = list(texts)
    found: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, int] = {}
    tensors = {name: [_tensor(text) for text in texts[name]] for name in names}
    async with triton.InferenceServerClient(url) as client:
        begin = time.perf_counter()

        async def loop() -> None:
            while time.perf_counter() - begin < seconds:
                name = names[int(random.choice(len(names), p=SHARES))]
                tensor = tensors[name][int(random.integers(len(tensors[name])))]
                started = time.perf_counter()
                try:
                    await client.infer(model, [tensor])
                    found[name].append(time.perf_counter() - started)
                except InferenceServerException as error:
                    text = f"{error.status()}: {error.message()}"[:200]
                    errors[text] = errors.get(text, 0) + 1
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(loop() for _ in range(clients)))
        return Latencies(found, errors, time.perf_counter() - begin)


def _tensor(text: str) -> Any:
    tensor = triton.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
    return tensor
