"""The kinds of faults that need a running server: one small random model behind one real tritonserver."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio
from tritonclient.utils import InferenceServerException

from builders.ports import free_ports
from builders.server import TritonServer
from tests.cases.conftest import Sample
from tests.integration.conftest import PATIENT
from tests.tools.load import text_input
from tests.tools.repositories import repository

LENGTHS = (16, 64, 512)


@dataclass(frozen=True)
class Site:
    """The server, and how long the very first request of each bucket took, seconds."""

    server: TritonServer
    first: dict[int, float]


def timed(client: Any, length: int) -> float:
    began = time.perf_counter()
    client.infer("encode", [text_input(["w7 " * (length - 2)])])
    return time.perf_counter() - began


@pytest.fixture(scope="module")
def site(bert: Sample, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    built = repository(
        tmp_path_factory.mktemp("cases"),
        "deploy.cpu.yaml",
        model={"source": str(bert.source.folder), "max_tokens": 512},
        buckets=list(LENGTHS),
        entry={**PATIENT, "processes": 1},
    )
    with TritonServer(built.repository, built.models, ports=free_ports()) as server:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            first = {length: timed(client, length) for length in LENGTHS}
        yield Site(server, first)


def counts(client: Any, length: int) -> tuple[int, int]:
    """Texts and calls that a bucket model has answered."""
    found = client.get_inference_statistics(f"encoder_{length}").model_stats[0]
    return int(found.inference_count), int(found.execution_count)


def test_12_mixed_lengths_are_one_call_a_bucket_when_they_come_together(site: Site) -> None:
    texts = ["w7 " * words for words in range(3, 35)]  # 5 to 36 tokens
    with grpc.InferenceServerClient(site.server.grpc_url) as client:
        before = {length: counts(client, length) for length in LENGTHS}
        result = client.infer("encode", [text_input(texts)])
        after = {length: counts(client, length) for length in LENGTHS}
    assert result.as_numpy("TOKENS").ravel().tolist() == list(range(5, 37))
    done = {length: tuple(b - a for a, b in zip(before[length], after[length], strict=True)) for length in LENGTHS}
    assert {length: texts for length, (texts, _) in done.items()} == {16: 12, 64: 20, 512: 0}
    # A bucket's largest batch bounds a call, 8 and 4 texts here; without padding to buckets there would be 32.
    assert sum(calls for _, calls in done.values()) <= 2 + 5


@pytest.mark.parametrize("text", ["Я", "🚲🚲", "a\0b", "", "\u200b"])
def test_13_unusual_text_is_answered_when_it_is_utf8(text: str, site: Site) -> None:
    """More of them, and HTTP: tests/integration/test_bad_input.py."""
    with grpc.InferenceServerClient(site.server.grpc_url) as client:
        result = client.infer("encode", [text_input([text])])
    assert np.isfinite(result.as_numpy("EMBEDDING")).all()


def test_13_bytes_are_refused_with_their_place_when_they_are_no_utf8(site: Site) -> None:
    with (
        grpc.InferenceServerClient(site.server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=r"text 1.*UTF-8") as caught,
    ):
        client.infer("encode", [text_input(["w7", b"\xff"])])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_15_first_request_of_each_bucket_is_as_fast_as_later_ones(site: Site) -> None:
    """Plans are warmed up by Triton itself, every batch step too: tests/builders/test_render.py."""
    with grpc.InferenceServerClient(site.server.grpc_url) as client:
        config = client.get_model_config("encoder_16").config
        lane = json.loads(config.parameters["lane"].string_value)
        later = {length: sorted(timed(client, length) for _ in range(7)) for length in LENGTHS}
    assert {1, config.max_batch_size} <= set(lane["steps"])
    # 50 ms for a machine that does other things. The first of all is the entry's first too, which nothing may warm up
    # (a warm-up that calls an absent lane hangs the start-up), and opens the connection.
    spare = {length: 0.25 if length == LENGTHS[0] else 0.05 for length in LENGTHS}
    assert all(site.first[length] < 3 * later[length][-1] + spare[length] for length in LENGTHS), (site.first, later)


def test_16_good_requests_are_answered_when_a_bad_one_shares_their_batch(site: Site) -> None:
    """24 and 3 of them: tests/integration/test_bad_input.py."""

    async def run() -> list[Any]:
        async with aio.InferenceServerClient(site.server.grpc_url) as client:
            calls = [client.infer("encode", [text_input([text])]) for text in ("w7 w8", b"\xff", "w9")]
            return await asyncio.gather(*calls, return_exceptions=True)

    first, bad, last = asyncio.run(run())
    assert isinstance(bad, InferenceServerException)
    assert "UTF-8" in bad.message()
    assert [each.as_numpy("TOKENS").item() for each in (first, last)] == [4, 3]


def test_17_cancelled_requests_never_reach_a_lane_when_they_wait_in_the_queue(site: Site) -> None:
    """The one process of the entry is busy with whole batches of long texts meanwhile."""
    busy = text_input(["w7 " * 500] * 32)

    async def run() -> tuple[list[Any], list[Any]]:
        async with aio.InferenceServerClient(site.server.grpc_url) as client:
            long = [asyncio.ensure_future(client.infer("encode", [busy])) for _ in range(6)]
            await asyncio.sleep(0.1)
            short = [asyncio.ensure_future(client.infer("encode", [text_input(["w8"])])) for _ in range(20)]
            await asyncio.sleep(0.1)
            for call in short:
                call.cancel()
            gone = await asyncio.gather(*short, return_exceptions=True)
            return gone, await asyncio.gather(*long)

    with grpc.InferenceServerClient(site.server.grpc_url) as client:
        before = counts(client, 16)[0]
        gone, answered = asyncio.run(run())
        client.infer("encode", [text_input(["w8"])])  # behind them all
        after = counts(client, 16)[0]
    assert all(isinstance(each, asyncio.CancelledError) for each in gone)
    assert len(answered) == 6
    assert after - before == 1
