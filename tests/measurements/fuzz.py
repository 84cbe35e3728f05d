"""Malformed requests by the thousand, with good ones beside them: does anything crash, hang or hurt the good ones?

`python -m tests.measurements.fuzz --bodies 100000` starts a server, sends them (tests/tools/malformed.py) and says what
happened; exit code 1 when a process died, a request got neither an answer nor a closed connection within the limit, or
a good request failed, was answered wrongly or waited too long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import tritonclient.grpc.aio as triton

from builders.ports import free_ports
from builders.server import TritonServer
from tests.tools.load import text_input
from tests.tools.malformed import Malformed, malformed, shown
from tests.tools.memory import process_ids
from tests.tools.promises import Promise, markdown, print_promises
from tests.tools.repositories import repository

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_PORT = {"http": "http", "http2": "grpc"}
#: Triton 2.51 gives this error of one malformed tensor to the whole batch that it is in (docs/reliability.md).
_SHARED = "incomplete string data for inference input 'TEXT'"
_GOOD = ["How far is the moon?", "the quick brown fox " * 20]


@dataclass
class Report:
    """What came of it.

    Attributes:
        sent: malformed requests by kind.
        ends: how they ended (an HTTP status, a gRPC code, `closed`), by kind.
        hung: those that had no end within the limit.
        good: seconds that each good request took.
        bad_good: what was wrong with a good request.
        shared: good requests that got the error of a malformed one beside them, as Triton is known to do; they were
            right when they were asked again.
        died: process ids that were there before and are not there any more.
        slowest: the longest time to an end, seconds.
    """

    sent: Counter[str] = field(default_factory=Counter)
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    hung: list[Malformed] = field(default_factory=list)
    good: list[float] = field(default_factory=list)
    bad_good: list[str] = field(default_factory=list)
    shared: int = 0
    died: set[int] = field(default_factory=set)
    slowest: float = 0.0

    @property
    def holds(self) -> bool:
        """Nothing crashed, nothing hung, every good request was answered rightly."""
        return not (self.hung or self.bad_good or self.died) and len(self.good) > 0

    def lines(self) -> Iterator[str]:
        """For people."""
        kinds = sorted(self.ends.items())
        told = [(kind, ", ".join(f"{end} {count}" for end, count in ends.most_common(6))) for kind, ends in kinds]
        yield from markdown(["kind", "sent", "ends"], [[kind, str(self.sent[kind]), ends] for kind, ends in told])
        yield ""
        sent = sum(self.sent.values())
        yield f"{sent} malformed requests of {len(kinds)} kinds, the slowest ended after {self.slowest:.2f} s"
        if self.good:
            p50, p99 = np.percentile(self.good, [50, 99]) * 1000
            yield f"{len(self.good)} good requests beside them: P50 {p50:.0f} ms, P99 {p99:.0f} ms"
        yield f"{self.shared} of the good ones got the error of a malformed one in their batch and were asked again"
        yield f"{len(self.hung)} hung, {len(self.died)} processes died"
        yield from (f"hung: {shown(request)}" for request in self.hung[:5])
        yield from self.bad_good[:5]

    def promises(self) -> list[Promise]:
        """What is promised, and what came of it."""
        return [
            Promise("malformed requests without an end", len(self.hung), 0),
            Promise("processes that died", len(self.died), 0),
            Promise("good requests beside them that failed or were wrong", len(self.bad_good), 0),
        ]


def run_fuzz(
    server: TritonServer,
    requests: Iterable[Malformed],
    *,
    at_once: int = 16,
    limit_s: float = 10.0,
    model: str = "encode",
) -> Report:
    """Send them all.

    Args:
        server: a running one.
        requests: what to send.
        at_once: how many are under way.
        limit_s: longest time to an end, seconds, also of a good request.
        model: the entry, for the good requests.
    """
    before = process_ids(server.pid or 0)
    report = asyncio.run(_Fuzz(server, limit_s, model).run(requests, at_once))
    report.died = before - process_ids(server.pid or 0)
    return report


class _Fuzz:
    def __init__(self, server: TritonServer, limit_s: float, model: str) -> None:
        self._server, self._limit_s, self._model = server, limit_s, model
        self._report, self._over = Report(), False

    async def run(self, requests: Iterable[Malformed], at_once: int) -> Report:
        waiting = iter(requests)
        async with grpc.aio.insecure_channel(self._server.grpc_url) as channel:
            call = channel.unary_unary(_INFER)
            expected = [await self._ask_grpc(texts) for texts in self._good_texts()]
            good = asyncio.create_task(self._good(expected))
            await asyncio.gather(*(self._sender(waiting, call) for _ in range(at_once)))
            self._over = True
            await good
        return self._report

    async def _sender(self, waiting: Iterator[Malformed], call: Any) -> None:
        for request in waiting:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._limit_s):
                    end = await (self._grpc(call, request) if request.way == "grpc" else self._bytes(request))
            except TimeoutError:
                self._report.hung.append(request)
                end = "hung"
            self._report.slowest = max(self._report.slowest, time.monotonic() - began)
            self._report.sent[request.kind] += 1
            self._report.ends.setdefault(request.kind, Counter())[end] += 1

    async def _grpc(self, call: Any, request: Malformed) -> str:
        try:
            await call(request.data)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def _bytes(self, request: Malformed) -> str:
        ports = self._server.ports
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", getattr(ports, _PORT[request.way]))
        except OSError:
            return "no connection"
        try:
            # A connection that the server closes while we still write is an end as good as any.
            with contextlib.suppress(OSError):
                writer.write(request.data)
                if request.unfinished:
                    writer.write_eof()
                # An HTTP answer begins with its status. gRPC sends its settings first, whatever comes: the end counts.
                answer = await reader.read(64 if request.way == "http" else -1)
                if request.way == "http" and answer:
                    return answer.split()[1].decode("latin-1") if answer.startswith(b"HTTP/") else "other bytes"
            return "closed"
        finally:
            writer.transport.abort()

    # Good requests

    def _good_texts(self) -> list[list[str]]:
        return [[text] for text in _GOOD]

    async def _good(self, expected: list[Any]) -> None:
        """One after the other, over gRPC and HTTP in turn, each on a connection of its own."""
        number = 0
        while not self._over or number < 2:
            which, over_http = number % len(expected), number % 3 == 0
            texts = self._good_texts()[which]
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._limit_s):
                    answer = await (self._ask_http(texts) if over_http else self._ask_grpc(texts))
                if not np.allclose(answer, expected[which], atol=1e-4):
                    self._report.bad_good.append(f"a good request got the wrong vector: {texts[0][:40]!r}")
            except Exception as error:  # whatever went wrong with it is the finding
                if _SHARED in str(error):
                    self._report.shared += 1
                    continue
                self._report.bad_good.append(f"a good request failed: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
            self._report.good.append(time.monotonic() - began)
            number += 1
            await asyncio.sleep(0.02)

    async def _ask_grpc(self, texts: list[str]) -> Any:
        async with triton.InferenceServerClient(self._server.grpc_url) as client:
            result = await client.infer(self._model, [text_input(texts)], priority=1)
            return result.as_numpy("EMBEDDING")

    async def _ask_http(self, texts: list[str]) -> Any:
        tensor = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
        url = f"{self._server.http_url}/v2/models/{self._model}/infer"

        def ask() -> Any:
            body = json.dumps({"inputs": [tensor]}).encode()
            try:
                with urllib.request.urlopen(url, body, timeout=self._limit_s) as response:  # noqa: S310 - loopback
                    outputs = {output["name"]: output for output in json.load(response)["outputs"]}
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{error.code}: {error.read().decode()}") from error
            return np.array(outputs["EMBEDDING"]["data"], dtype=np.float32).reshape(outputs["EMBEDDING"]["shape"])

        return await asyncio.to_thread(ask)


def main() -> None:
    """Start a server and send them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=2000, help="malformed requests to send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=16, help="under way at the same time")
    parser.add_argument("--limit", type=float, default=20.0, help="longest time to an end, seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = repository(Path(folder))
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            began = time.monotonic()
            requests = malformed(options.bodies, options.seed)
            report = run_fuzz(server, requests, at_once=options.at_once, limit_s=options.limit)
            print(f"seed {options.seed}: {time.monotonic() - began:.0f} s")
    print()
    for line in report.lines():
        print(line)
    print_promises(report.promises())
    sys.exit(0 if report.holds else 1)


if __name__ == "__main__":
    main()
