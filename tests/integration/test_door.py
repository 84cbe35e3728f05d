"""The door in front of the real server, called with OpenAI's official client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from builders.server import TritonServer
from clients import EncoderClient
from tests.door.doors import RunningDoor, running

TEXTS = ["How far is the moon?", "384,400 km", "Ünïcode, 月", "", "a [MASK] and 'quotes'"] * 8


@pytest.fixture(scope="module")
def tokenizer(cpu_server: TritonServer) -> str:
    (found,) = cpu_server.repository.glob("encode/1/tokenizer.json")
    return str(found)


@pytest.fixture(scope="module")
def door(cpu_server: TritonServer, tokenizer: str) -> Iterator[RunningDoor]:
    with running(cpu_server.grpc_url, tokenizer=tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def client(door: RunningDoor) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none needed", max_retries=0) as made:
        yield made


def vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    return np.array([one.embedding for one in answer.data], np.float32)


def test_openai_client_gets_what_the_grpc_client_gets(cpu_server: TritonServer, client: OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["encode"]
    with EncoderClient(cpu_server.grpc_url) as direct:
        expected = direct.encode(TEXTS)
    for given in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="encode", input=TEXTS, **given)  # type: ignore[call-overload]
        assert np.abs(vectors(answer) - expected.embeddings).max() < 1e-4  # batches differ, and sums with them
        assert answer.usage.total_tokens == expected.tokens.sum()


def test_token_ids_of_the_model_give_the_vectors_of_their_text(client: OpenAI, tokenizer: str) -> None:
    reader = Tokenizer.from_file(tokenizer)
    reader.no_truncation()
    reader.no_padding()
    ids = [reader.encode(text).ids for text in TEXTS[:5]]
    by_ids = vectors(client.embeddings.create(model="encode", input=ids))
    assert np.abs(by_ids - vectors(client.embeddings.create(model="encode", input=TEXTS[:5]))).max() < 1e-4


def test_text_that_is_too_long_is_cut_or_refused_as_asked(door: RunningDoor, client: OpenAI) -> None:
    text = "word " * 700
    reply = door.embed(text)
    assert (reply.status, reply.headers["x-cut-tokens"]) == (200, "190")
    with pytest.raises(openai.BadRequestError, match="text 0 has 702 tokens"):
        client.embeddings.create(model="encode", input=text, extra_body={"truncate": "error"})


def test_queue_timeout_is_503_and_health_is_ready(door: RunningDoor) -> None:
    reply = door.embed(X_Queue_Timeout_Ms="1", X_Priority="interactive")  # the window alone is longer
    assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
    assert door.get("/health").json == {"status": "ready", "models": {"encode": True}}
