"""What the door adds to a call: pairs of the same text over gRPC and through the door, from one client.

`python -m tests.measurements.door` builds deploy.cpu.yaml, starts its server and a door as a process of its own, and
prints the table; `--triton HOST:PORT --door HOST:PORT` measures those that run. Both ways of a pair are taken in random
order, on connections that stay open, so that the difference of a pair is free of what the machine was doing meanwhile.
The HTTP side is Python's own client and json, whose parsing is counted. OpenAI's client is told and not promised: what
it does by itself is more than the door's share.

The promise: a median of the differences of at most 3 ms over 1,000 pairs. Exit code 1 when it does not hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from builders.ports import free_ports
from builders.server import TritonServer
from clients import EncoderClient
from tests.texts import mixed_texts
from tests.tools.promises import Promise, markdown, print_promises
from tests.tools.repositories import repository

LIMIT_MS = 3.0
#: Characters of the longest text: a search's; of longer ones the model's time says more than the door's.
LONGEST = 200

Call = Callable[[str], int]
"""Sends a text, and gives the number of values of its vector."""


@dataclass(frozen=True)
class Pairs:
    """The times of one way beside gRPC's, seconds, pair by pair.

    Attributes:
        way: through the door.
        direct: float64 [n], over gRPC.
        door: float64 [n], through the door.
    """

    way: str
    direct: NDArray[np.float64]
    door: NDArray[np.float64]

    @property
    def differences_ms(self) -> NDArray[np.float64]:
        """float64 [n], what the door added."""
        return (self.door - self.direct) * 1000

    def interval_ms(self) -> tuple[float, float]:
        """Bounds of the median difference, 95 %: the order statistics at n/2 ± 0.98 √n, of any distribution."""
        ordered, n = np.sort(self.differences_ms), len(self.direct)
        low, high = (int(np.clip(n / 2 + side * 0.98 * n**0.5, 0, n - 1)) for side in (-1, 1))
        return float(ordered[low]), float(ordered[high])

    def cells(self) -> list[str]:
        """Way, both medians, median difference with its bounds, the difference's quartiles and P99."""
        low, high = self.interval_ms()
        quarter, middle, three, most = np.percentile(self.differences_ms, [25, 50, 75, 99])
        return [
            self.way,
            f"{np.median(self.direct) * 1000:.2f}",
            f"{np.median(self.door) * 1000:.2f}",
            f"{middle:+.2f}",
            f"{low:+.2f} to {high:+.2f}",
            f"{quarter:+.2f} to {three:+.2f}",
            f"{most:+.2f}",
        ]


def main() -> None:
    """Print the table and whether the promise holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", help="HOST:PORT of a door that runs, with --triton")
    parser.add_argument("--triton", help="HOST:PORT, gRPC, of the server behind it")
    parser.add_argument("--pairs", type=int, default=1000, help="of each way")
    parser.add_argument("--without-openai", action="store_true", help="leave OpenAI's client out")
    options = parser.parse_args()
    if (options.door is None) != (options.triton is None):
        parser.error("give both --door and --triton, or neither")
    with running(options.door, options.triton) as (door, triton), EncoderClient(triton, retry=None) as client:
        ways = {"floats": over_http(door, "float"), "base64": over_http(door, "base64")}
        promised = list(ways)
        if not options.without_openai:
            ways["OpenAI's client"] = over_openai(door)
        texts = [text for text in mixed_texts(4 * options.pairs, seed=5) if len(text) < LONGEST][: options.pairs]

        def direct(text: str) -> int:
            return client.encode(text, priority="interactive").embeddings.size

        results = [paired(name, direct, way, texts) for name, way in ways.items()]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; {len(texts)} pairs of each way; milliseconds\n")
    header = ["through the door", "gRPC, P50", "door, P50", "difference, median", "95 %", "quartiles", "P99"]
    for line in markdown(header, [result.cells() for result in results]):
        print(line)
    medians = {result.way: float(np.median(result.differences_ms)) for result in results}
    held = print_promises(
        [
            Promise(f"median difference, {way}", medians[way], LIMIT_MS if way in promised else None, "ms")
            for way in medians
        ]
    )
    sys.exit(0 if held else 1)


@contextmanager
def running(door: str | None, triton: str | None) -> Iterator[tuple[str, str]]:
    """Addresses of a door and its server: those given, or new ones until the block ends."""
    if door is not None and triton is not None:
        yield door, triton
        return
    with tempfile.TemporaryDirectory() as folder:
        built = repository(Path(folder), "deploy.cpu.yaml")
        with (
            TritonServer(built.repository, built.models, ports=free_ports()) as server,
            door_process(server.grpc_url) as address,
        ):
            yield address, server.grpc_url


@contextmanager
def door_process(triton: str) -> Iterator[str]:
    """The door's own command; its address."""
    command = [sys.executable, "-m", "clients", "door", "--listen", "127.0.0.1:0", "--triton", triton]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _ready(process, log.fileno())
        finally:
            process.terminate()
            process.wait(60)


def _ready(process: subprocess.Popen[bytes], log: int) -> str:
    """The address that its log names, once its models are ready."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        time.sleep(0.1)
        text = os.pread(log, 1 << 20, 0).decode()
        if "running on http://" not in text:
            continue
        address = text.split("running on http://", 1)[1].split()[0]
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("GET", "/health")
        ready = connection.getresponse().status == 200
        connection.close()
        if ready:
            return address
    raise SystemExit(f"the door did not start:\n{os.pread(log, 1 << 20, 0).decode()}")


def over_http(address: str, form: str) -> Call:
    """Through the door with Python's own client, on a connection that stays open.

    Args:
        address: of the door.
        form: `encoding_format`.
    """
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


def over_openai(address: str) -> Call:
    """The same with the official client, as it is by default."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://{address}/v1", api_key="none", default_headers={"X-Priority": "interactive"})
    return lambda text: len(client.embeddings.create(model="encode", input=text).data[0].embedding)


def paired(name: str, direct: Call, door: Call, texts: list[str]) -> Pairs:
    """Takes the pairs, and a tenth of them beforehand, uncounted."""
    chance = random.Random(1)
    times: dict[Call, list[float]] = {direct: [], door: []}
    for text in [*texts[: max(1, len(texts) // 10)], *texts]:
        for way in chance.sample((direct, door), 2):
            began = time.perf_counter()
            way(text)
            times[way].append(time.perf_counter() - began)
    return Pairs(name, np.array(times[direct][-len(texts) :]), np.array(times[door][-len(texts) :]))


if __name__ == "__main__":
    main()
