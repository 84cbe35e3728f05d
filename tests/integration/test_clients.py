"""Both clients over both protocols against the real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.ports import free_ports
from builders.server import TritonServer
from clients import (
    DeadlineExceeded,
    EncoderClient,
    InvalidInput,
    QueueTimeout,
    Retry,
    RetryPolicy,
    ServerUnavailable,
    Tls,
)
from clients.status import fetch_metrics
from tests.clients.certificates import make_certificates
from tests.clients.ways import WAYS, Way
from tests.texts import mixed_texts
from tests.tools.metrics import counter

# Short ones, so that four ways cost little; two requests of them.
TEXTS = [text for text in mixed_texts(200, seed=13) if len(text) < 100][:40]


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def client(cpu_server: TritonServer, way: Way) -> Iterator[Any]:
    with way.client(cpu_server) as made:
        yield made


@pytest.fixture(scope="module")
def expected(cpu_server: TritonServer) -> np.ndarray:
    with EncoderClient(cpu_server.grpc_url) as client:
        return client.encode(TEXTS).embeddings


def test_answers_are_the_same_whatever_the_way(client: Any, expected: np.ndarray) -> None:
    result = client.encode(TEXTS, priority="interactive")
    assert np.abs(result.embeddings - expected).max() < 1e-4  # batches differ, and sums with them
    assert result.tokens.tolist() == client.encode(np.array(TEXTS), priority=2).tokens.tolist()
    assert client.similarity(TEXTS[0], TEXTS[:2])[0, 0] == pytest.approx(1, abs=1e-4)


def test_errors_are_the_same_whatever_the_way(client: Any, cpu_server: TritonServer, way: Way) -> None:
    with pytest.raises(InvalidInput, match=r"text 40 has 702 tokens") as caught:
        client.encode(["a"] * 40 + ["word " * 700], truncate="error")
    assert (caught.value.texts, caught.value.status) == (range(40, 41), "INVALID_ARGUMENT")
    with way.client(cpu_server, batch=40) as large, pytest.raises(InvalidInput, match="smaller batch"):
        large.encode(["a"] * 40)
    with way.client(cpu_server, model="none") as other:
        assert not other.ready()
        for call in (lambda: other.encode("a"), other.dim, other.facts):
            with pytest.raises(ServerUnavailable):
                call()


def test_queue_timeout_is_tried_again_and_counted(cpu_server: TritonServer, way: Way) -> None:
    told: list[Retry] = []
    policy = RetryPolicy(limit=2, first=0.01, on_retry=told.append)
    with way.client(cpu_server, retry=policy) as client, pytest.raises(QueueTimeout) as caught:
        client.encode("impatient", timeout=1e-4)  # the window alone is longer
    assert (caught.value.retries, [one.number for one in told]) == (2, [1, 2])


def test_deadline_ends_a_call_and_leaves_the_client_usable(client: Any) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.encode(["long " * 480] * 2, deadline=0.02)
    assert time.monotonic() - began < 1
    assert len(client.encode("a", deadline=60)) == 1


def test_leaving_early_cancels_what_is_under_way(cpu_server: TritonServer, way: Way) -> None:
    with way.client(cpu_server, batch=4, concurrency=2) as client:
        client.encode("what other tests left behind is done")
        computed = counter(cpu_server.metrics_url, "nv_inference_count", model="encode")
        results = client.encode_batches(["a text that is read"] * 400)
        assert len(next(results)) == 4
        results.close()
        client.encode("the last")
    assert counter(cpu_server.metrics_url, "nv_inference_count", model="encode") - computed < 100


def test_one_client_serves_many_threads(client: Any, expected: np.ndarray) -> None:
    wrong: list[int] = []

    def work(thread: int) -> None:
        for number in range(thread, len(TEXTS), 4):
            one = client.encode(TEXTS[number]).embeddings[0]
            if np.abs(one - expected[number]).max() > 1e-4:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_server_says_what_it_is(client: Any, cpu_server: TritonServer) -> None:
    assert client.live()
    assert client.ready()
    assert client.dim() == 384
    assert (client.facts().task, client.facts().size) == ("embedding", 384)
    client.encode(TEXTS[:8])
    status = client.status(metrics=fetch_metrics(cpu_server.metrics_url))
    assert status.version == "2.51.0"
    entry = next(one for one in status.models if one.name == "encode")
    assert entry.state == "READY"
    assert entry.pending <= 1  # the queue's own wake-up may wait
    assert entry.requests > 0
    assert entry.queue_ms is not None
    assert entry.p99_ms is not None
    assert {f"encoder_{length}" for length in (32, 512)} <= {one.name for one in status.models}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def locked_server(cpu_server: TritonServer, certificates: Path) -> Iterator[TritonServer]:
    """One lane, gRPC with TLS and the client's certificate, everything but health behind a key."""
    protocols = "inference,metadata,statistics,model-repository"
    extra = [
        "--grpc-use-ssl=1", "--grpc-use-ssl-mutual=1", f"--grpc-server-cert={certificates / 'server.pem'}",
        f"--grpc-server-key={certificates / 'server.key'}", f"--grpc-root-cert={certificates / 'ca.pem'}",
        f"--grpc-restricted-protocol={protocols}:admin-key=1234",
        f"--http-restricted-api={protocols}:admin-key=1234",
    ]  # fmt: skip
    with TritonServer(cpu_server.repository, ["encoder_32"], ports=free_ports(), extra_args=extra) as server:
        yield server


def test_locked_server_opens_to_its_key_and_certificates(
    locked_server: TritonServer,
    certificates: Path,
    way: Way,
) -> None:
    own = Tls(certificates / "ca.pem", certificates / "client.pem", certificates / "client.key")
    options: dict[str, Any] = {"model": "encoder_32", "tls": own if way.protocol == "grpc" else None}
    with way.client(locked_server, **options) as client:
        assert client.ready()
        for call in (client.dim, client.status, lambda: client.encode("a")):
            with pytest.raises(InvalidInput, match="key"):
                call()
    with way.client(locked_server, restricted_key=("admin-key", "1234"), **options) as client:
        assert client.dim() == 384
        assert [one.state for one in client.status().models if one.name == "encoder_32"] == ["READY"]
        with pytest.raises(InvalidInput, match="TEXT"):  # the lane is reached, and has other inputs
            client.encode("a")
    if way.protocol == "grpc":
        with way.client(locked_server, model="encoder_32", tls=Tls(certificates / "ca.pem")) as client:
            assert not client.ready()
