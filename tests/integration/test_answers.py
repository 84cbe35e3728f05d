"""Answers through the real server: right, in order, none lost, none swapped."""

from __future__ import annotations

import random

import numpy as np
import pytest

from builders.server import TritonServer
from builders.settings import load_settings
from builders.source import open_source
from clients import EncoderClient
from tests.texts import mixed_texts
from tests.tools.load import Call, closed_loop
from tests.tools.repositories import ROOT


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(-1) / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return mixed_texts(120, seed=7)


@pytest.fixture(scope="module")
def singles(cpu_server: TritonServer, texts: list[str]) -> np.ndarray:
    """Each text's answer when it is alone on the server."""
    with EncoderClient(cpu_server.grpc_url) as client:
        return np.concatenate([client.encode(text).embeddings for text in texts])


def test_answers_match_sentence_transformers_when_asked_over_grpc(texts: list[str], singles: np.ndarray) -> None:
    from sentence_transformers import SentenceTransformer

    source = open_source(load_settings(ROOT / "deploy.cpu.yaml").model)
    library = SentenceTransformer(str(source.folder), device="cpu", local_files_only=True)
    library.max_seq_length = 512
    chosen = slice(0, 40)
    assert cosines(singles[chosen], library.encode(texts[chosen], batch_size=4)).min() >= 0.9999


def test_order_is_kept_when_a_request_spans_every_bucket(
    cpu_server: TritonServer, texts: list[str], singles: np.ndarray
) -> None:
    order = random.Random(3).sample(range(len(texts)), 32)
    with EncoderClient(cpu_server.grpc_url) as client:
        result = client.encode([texts[number] for number in order])
    assert cosines(result.embeddings, singles[order]).min() >= 0.9999


@pytest.mark.timeout(900)
def test_nothing_is_lost_or_swapped_when_64_clients_send_2000_requests(
    cpu_server: TritonServer, texts: list[str], singles: np.ndarray
) -> None:
    chance = random.Random(11)
    # Every text comes, long ones seldom twice: they take most of the time, and a swap shows in any two.
    often = chance.choices(range(len(texts)), [1 / len(text) for text in texts], k=2000 - len(texts))
    numbers = chance.sample([*range(len(texts)), *often], 2000)
    calls = [Call((texts[number],), {"priority": chance.choice((0, 1, 2))}) for number in numbers]
    samples, _ = closed_loop(cpu_server.grpc_url, calls, clients=64)
    assert len(samples) == 2000
    assert [sample.error for sample in samples if sample.error] == []
    answers = np.concatenate([sample.vectors for sample in samples if sample.vectors is not None])
    assert cosines(answers, singles[numbers]).min() >= 0.9999
    # Different texts do differ, so the comparison above would have seen a swap.
    assert np.median(cosines(answers, singles[np.roll(numbers, 1)])) < 0.99


def test_text_is_cut_and_counted_when_it_is_over_the_limit(cpu_server: TritonServer) -> None:
    with EncoderClient(cpu_server.grpc_url) as client:
        result = client.encode(["word " * 509, "word " * 510, "word " * 511, "word " * 700])
    assert result.tokens.tolist() == [511, 512, 512, 512]
    assert result.cut.tolist() == [0, 0, 1, 190]
    assert np.array_equal(result.embeddings[1], result.embeddings[3])


def test_long_texts_are_answered_when_short_ones_share_their_request(long_server: TritonServer) -> None:
    texts = ["short", "middle " * 300, "long " * 900, "longest " * 2000, "also short"]
    with EncoderClient(long_server.grpc_url) as client:
        together = client.encode(texts)
        alone = np.concatenate([client.encode(text).embeddings for text in texts])
    assert together.tokens.tolist() == [3, 302, 902, 2002, 4]
    assert cosines(together.embeddings, alone).min() >= 0.9999
