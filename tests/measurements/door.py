"""What the door adds to a call: `python -m tests.measurements.door --door HOST:PORT --triton HOST:PORT [--pairs N]`.

One client. Each pair sends the same text over gRPC and through the door, in random order, on connections that stay
open; the difference of a pair is free of what the machine was doing meanwhile. The aim: a median difference of at most
3 ms over 1,000 pairs. The HTTP side is Python's own client and json, so its parsing is counted; --openai adds the
official client, whose own work is larger than the door's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import time
from collections.abc import Callable

import numpy as np

from clients import EncoderClient
from tests.texts import mixed_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--door", default="127.0.0.1:8080")
    parser.add_argument("--triton", default="127.0.0.1:8001")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--openai", action="store_true")
    given = parser.parse_args()
    texts = [text for text in mixed_texts(4 * given.pairs, seed=5) if len(text) < 200][: given.pairs]
    with EncoderClient(given.triton, retry=None) as client:
        ways: dict[str, Callable[[str], int]] = {
            "door, floats": over_http(given.door, "float"),
            "door, base64": over_http(given.door, "base64"),
        }
        if given.openai:
            ways["door, openai's client"] = over_openai(given.door)
        print(f"{platform.machine()}, {len(texts)} pairs each; milliseconds")
        for name, way in ways.items():
            show(name, *paired(lambda text: client.encode(text, priority="interactive").embeddings.size, way, texts))


def over_http(address: str, form: str) -> Callable[[str], int]:
    """One call through the door on a connection that stays open; gives the number of values."""
    connection = http.client.HTTPConnection(address, timeout=30)
    headers = {"Content-Type": "application/json", "X-Priority": "interactive"}

    def call(text: str) -> int:
        body = json.dumps({"model": "encode", "input": text, "encoding_format": form})
        connection.request("POST", "/v1/embeddings", body, headers)
        answer = connection.getresponse()
        value = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"HTTP {answer.status}: {value}")
        return len(value["data"][0]["embedding"])

    return call


def over_openai(address: str) -> Callable[[str], int]:
    """The same with the official client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://{address}/v1", api_key="-", default_headers={"X-Priority": "interactive"})
    return lambda text: len(client.embeddings.create(model="encode", input=text).data[0].embedding)


def paired(one: Callable[[str], int], other: Callable[[str], int], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Times of both, seconds, pair by pair; the first tenth again beforehand, uncounted."""
    chance = random.Random(1)
    times: dict[Callable[[str], int], list[float]] = {one: [], other: []}
    for text in [*texts[: max(1, len(texts) // 10)], *texts]:
        for way in chance.sample((one, other), 2):
            began = time.perf_counter()
            way(text)
            times[way].append(time.perf_counter() - began)
    return np.array(times[one][-len(texts) :]), np.array(times[other][-len(texts) :])


def show(name: str, direct: np.ndarray, door: np.ndarray) -> None:
    """One line: medians, and the median of the differences with its quartiles."""
    low, middle, high = np.percentile((door - direct) * 1000, [25, 50, 75])
    print(
        f"{name:24} gRPC {np.median(direct) * 1000:7.2f}  door {np.median(door) * 1000:7.2f}  "
        f"difference {middle:+6.2f} (quartiles {low:+.2f} to {high:+.2f})"
    )


if __name__ == "__main__":
    main()
