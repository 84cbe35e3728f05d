"""The door in front of the real server, called with OpenAI's official client.

With models of other tasks it is tested in test_tasks.py, overloaded in test_queue.py: their servers are there.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from builders.server import TritonServer
from clients import EncoderClient
from tests.door.doors import RunningDoor, running
from tests.integration.test_readme import DOOR, README, blocks
from tests.tools.metrics import counter
from tests.tools.repositories import ROOT
from tests.tools.waiting import until

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
    assert door.get("/health/ready").status == 200


def test_client_that_goes_away_leaves_the_server_nothing_to_do(cpu_server: TritonServer, door: RunningDoor) -> None:
    def computed() -> float:
        return counter(cpu_server.metrics_url, "nv_inference_count", model="encode")

    before = computed()
    connection = http.client.HTTPConnection("127.0.0.1", door.port)
    body = json.dumps({"input": [f"text {number} " + "word " * 20 for number in range(2048)]})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    assert until(lambda: computed() > before)
    connection.close()
    assert until(lambda: door.metric("door_requests_total", status="499") == 1)
    seen = [computed()]
    while len(seen) < 2 or seen[-1] > seen[-2]:  # until nothing is left to compute
        time.sleep(0.5)
        seen.append(computed())
    assert seen[-1] - before < 1024, "of 64 requests eight are under way at once, and the others were never sent"
    assert door.embed().status == 200


# What the pages show

PAGES = {"README.md": README, "docs/door.md": (ROOT / "docs" / "door.md").read_text(encoding="utf-8")}


@pytest.mark.parametrize("page", PAGES)
def test_python_example_runs(door: RunningDoor, page: str) -> None:
    (code,) = blocks("python", of_door=True, page=PAGES[page])
    code = code.replace(f"http://{DOOR}", door.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 384) 15\n"


@pytest.mark.parametrize("page", PAGES)
def test_curl_example_runs(door: RunningDoor, page: str) -> None:
    (code,) = [block for block in blocks("sh", of_door=True, page=PAGES[page]) if block.startswith("curl")]
    code = code.replace(f"http://{DOOR}", door.url)
    done = subprocess.run(code, shell=True, capture_output=True, text=True, timeout=60)  # noqa: S602 - the page's own
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["total_tokens"] == 15
