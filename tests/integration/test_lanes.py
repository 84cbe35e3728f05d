"""The two lanes on two cores: long texts must not be in the way of short ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from builders.ports import free_ports
from builders.server import TritonServer
from clients import EncoderClient
from tests.integration.conftest import PATIENT
from tests.texts import mixed_texts
from tests.tools.load import Call, Sample, closed_loop, open_loop, percentile_ms, poisson
from tests.tools.repositories import timed_repository

SHORT = [text for text in mixed_texts(400, seed=5) if len(text) < 200]
LONG = " ".join(mixed_texts(40, seed=6))[:7000]


class LongTraffic:
    """Keeps the long lane saturated from several threads until the block is left; counts the answers."""

    def __init__(self, url: str, clients: int):
        self.url, self.answers = url, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> LongTraffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with EncoderClient(self.url) as client:
            while not self._stop.is_set():
                assert client.encode(LONG).tokens[0] > 512
                self.answers += 1


def short_traffic(url: str, rate: float, seconds: float, seed: int) -> list[Sample]:
    times = poisson(rate, seconds, seed)
    return open_loop(url, [Call((SHORT[number % len(SHORT)],), at=at) for number, at in enumerate(times)])


@pytest.mark.timeout(300)
def test_short_p50_holds_when_long_texts_saturate_their_lane(long_server: TritonServer) -> None:
    url = long_server.grpc_url
    samples, elapsed = closed_loop(url, [Call((SHORT[n % len(SHORT)],)) for n in range(400)], clients=32)
    rate = 0.3 * len(samples) / elapsed
    before = short_traffic(url, rate, 6, seed=1)
    with LongTraffic(url, clients=6) as traffic:
        with_long = short_traffic(url, rate, 10, seed=2)
    after = short_traffic(url, rate, 6, seed=3)
    assert traffic.answers > 0
    assert not [sample.error for sample in (*before, *with_long, *after) if sample.error]
    alone = (percentile_ms(before, 50) + percentile_ms(after, 50)) / 2
    print(f"short P50 at {rate:.0f}/s: alone {alone:.1f} ms, beside long {percentile_ms(with_long, 50):.1f} ms")
    assert percentile_ms(with_long, 50) <= 2.5 * alone


def test_request_is_refused_at_once_when_the_long_lane_is_full(tmp_path: Path) -> None:
    built = timed_repository(
        tmp_path, 0.3, "deploy.long.cpu.yaml", entry={**PATIENT, "processes": 1}, lanes={"long": {"bound": 32}}
    )
    with TritonServer(built.repository, built.models, ports=free_ports()) as server:
        # Background texts would fill only half of the bound.
        level = {"parameters": {"class": "interactive"}}
        calls = [Call((LONG,), level, at=0.005 * number) for number in range(40)]
        samples = open_loop(server.grpc_url, [*calls, Call(("short",), at=0.4, kind="short")])
    refused = [sample for sample in samples[:-1] if sample.error]
    # Up to two texts may have been computed while the others came in.
    assert 6 <= len(refused) <= 8
    assert all("UNAVAILABLE" in (sample.error or "") for sample in refused)
    assert all("lanes.long.bound" in (sample.error or "") and "32" in (sample.error or "") for sample in refused)
    assert max(sample.latency for sample in refused) < 0.5, "at once; what is held takes 5 s"
    assert samples[-1].error is None
    # Not behind the long ones, which take 5 s; its own lane takes 0.3 s.
    assert samples[-1].latency < 1.0
