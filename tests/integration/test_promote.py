"""Promote and rollback on the real server, under load: nothing is lost, every answer is of one version."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from builders.change import VersionChange
from builders.control import ModelControl
from builders.errors import LoadError, ManifestError, RestrictedError, UnreachableError
from builders.manifest import read_manifest, sha256_of
from builders.names import entry_model, lane_model
from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import DeploySettings, load_settings
from builders.state import read_state
from builders.supervisor import served_version
from builders.versions import Change, check_served, promote, rollback
from clients import EncoderClient, EncoderError
from tests.integration.conftest import PATIENT
from tests.tools.repositories import build_ungated, settings_file

OTHER = "package:sre_embedding_model/model_weights"
KEY = ("control", "secret")
TEXTS = [f"{'a longer text about ' * (3 * (number % 3))}the number {number}" for number in range(24)]
CLIENTS = 8


@dataclass
class Site:
    """A repository with both versions, its settings and its server."""

    folder: Path
    settings: DeploySettings
    models: tuple[str, ...]
    server: TritonServer | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def repository(self) -> Path:
        return self.settings.repository

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.grpc_url

    def start(self) -> TritonServer:
        self.server = TritonServer(
            self.repository,
            self.models,
            ports=free_ports(),
            log_path=self.folder / "server.log",
            extra_args=[f"--grpc-restricted-protocol=model-repository:{KEY[0]}={KEY[1]}"],
        )
        return self.server.__enter__()

    def promote(self, version: int, **options: object) -> Change:
        return promote(self.repository, self.settings, version, self.url, self.lines.append, key=KEY, **options)

    def rollback(self) -> Change:
        return rollback(self.repository, self.settings, self.url, self.lines.append, key=KEY)

    def vectors(self) -> np.ndarray:
        with EncoderClient(self.url) as client:
            return np.concatenate([client.encode(text).embeddings for text in TEXTS])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Version 1 served, version 2 (another fine-tune of the same shape) published; two buckets, to be quick."""
    pytest.importorskip("sre_embedding_model")
    folder = tmp_path_factory.mktemp("promote")
    small = {"buckets": [16, 64], "entry": {**PATIENT, "processes": 2}}
    settings = load_settings(settings_file(folder, "deploy.cpu.yaml", **small, model={"max_tokens": 64}))
    first = build_ungated(settings)
    assert (first.version, first.served) == (1, 1)
    site = Site(folder, settings, first.models)
    try:
        site.start()
        promote(site.repository, settings, 1, site.url, print, key=KEY)
        other = settings_file(folder, "deploy.cpu.yaml", **small, model={"source": OTHER, "max_tokens": 64})
        second = build_ungated(load_settings(other))
        assert (second.version, second.served, second.built) == (2, 1, True)
        yield site
    finally:
        assert site.server is not None
        site.server.stop()


@pytest.fixture(scope="module")
def expected(site: Site) -> dict[int, np.ndarray]:
    """Each version's vectors of `TEXTS`, computed without a server."""
    return {version: engine_vectors(site.repository, version) for version in (1, 2)}


def engine_vectors(repository: Path, version: int, name: str = "") -> np.ndarray:
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / entry_model(name) / str(version) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(64)
    session = onnxruntime.InferenceSession(str(repository / lane_model(name, 64) / str(version) / "model.onnx"))
    rows = []
    for text in TEXTS:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int32)
        feeds = {"input_ids": ids, "length": np.array([[ids.size]], dtype=np.int32)}
        rows.append(session.run(["EMBEDDING"], feeds)[0])
    return np.concatenate(rows)


def near(vector: np.ndarray, reference: np.ndarray) -> bool:
    return float(vector @ reference) >= 0.9999


@dataclass
class Traffic:
    """What the clients got: (sent, answered, text number, vector), and the errors."""

    answers: list[tuple[float, float, int, np.ndarray]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def traffic(url: str, *, model: str = "encode", clients: int = CLIENTS) -> Iterator[Traffic]:
    """Clients that ask as fast as they are answered."""
    seen, stop = Traffic(), threading.Event()

    def client_loop(first: int) -> None:
        number = first
        with EncoderClient(url, model=model) as client:
            while not stop.is_set():
                number = (number + 5) % len(TEXTS)
                sent = time.monotonic()
                try:
                    vector = client.encode(TEXTS[number]).embeddings[0]
                except EncoderError as error:
                    seen.errors.append(str(error))
                else:
                    seen.answers.append((sent, time.monotonic(), number, vector))

    threads = [threading.Thread(target=client_loop, args=(first,)) for first in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_no_request_fails_and_each_answer_is_of_one_version_when_promoted_and_rolled_back_under_load(
    site: Site, expected: dict[int, np.ndarray]
) -> None:
    # The versions differ, or the comparison below would see nothing.
    assert max(float(a @ b) for a, b in zip(expected[1], expected[2], strict=True)) < 0.99
    assert site.server is not None
    changes, watched = [], []
    with traffic(site.url) as seen:
        for change in (lambda: site.promote(2), site.rollback, lambda: site.promote(2), site.rollback):
            time.sleep(0.5)
            began = time.monotonic()
            done = change()
            changes.append((began, time.monotonic(), done))
            watched.append(served_version(site.server.http, ("encode",), "encoder_16"))
            print(done)
        time.sleep(0.5)
    assert seen.errors == []
    assert len(seen.answers) > 200
    print(len(seen.answers), "answers, longest", max(got - sent for sent, got, *_ in seen.answers))
    for sent, got, number, vector in seen.answers:
        versions = [version for version in (1, 2) if near(vector, expected[version][number])]
        assert len(versions) == 1, (number, versions)
        settled = [done.served for _, end, done in changes if end <= sent][-1:] or [1]
        running = [done.served for begin, end, done in changes if begin < got and sent < end]
        assert versions[0] in (*settled, *running)
    for _, _, done in changes[1::2]:
        assert not done.lanes_loaded
        assert done.seconds < 5
    assert [done.served for *_, done in changes] == watched == [2, 1, 2, 1]
    assert not changes[2][2].lanes_loaded


def test_old_version_stays_loaded_and_untouched_when_lanes_of_a_new_one_are_added(site: Site) -> None:
    assert site.server is not None
    assert site.server.log_path is not None
    log = site.server.log_path.read_text()
    # Each version of the lane was initialised once, though its configuration changed: no file of it had.
    assert log.count("TRITONBACKEND_ModelInstanceInitialize: encoder_16_0_0") == 2


def test_rollback_loads_the_lanes_and_says_so_when_they_were_dropped(
    site: Site, expected: dict[int, np.ndarray]
) -> None:
    site.promote(2, keep_old=False)
    with ModelControl(site.url, key=KEY) as control:
        assert control.ready_versions("encoder_16") == (2,)
    site.lines.clear()
    done = site.rollback()
    assert done.lanes_loaded
    assert "the lanes of version 1 are not loaded any more" in site.lines
    assert all(near(a, b) for a, b in zip(site.vectors(), expected[1], strict=True))


def edited(site: Site, tmp_path: Path, **facts: object) -> Path:
    """Version 2's manifest with other facts; returns the original's copy."""
    path = site.repository / "encode/2/manifest.json"
    copy = tmp_path / "manifest.json"
    copy.write_text(path.read_text())
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return copy


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"output": {"name": "EMBEDDING", "size": 768, "labels": None}}, "another model, its output size .*768.*384"),
        ({"output": {"name": "EMBEDDING", "size": 384, "labels": ["a"]}}, "another model, its labels"),
        (
            {"engine": "tensorrt", "machine": {"gpu": "NVIDIA H200", "compute_capability": "9.0", "tensorrt": "8.6.0"}},
            r"NVIDIA H200 \(compute capability 9.0\), TensorRT 8.6.0.*this one: .*make build-engines",
        ),
        ({"tokenizer_sha256": "0" * 64}, "tokenizer.json of encode is not the file that was published"),
        ({"buckets": []}, "buckets"),
    ],
    ids=["output size", "labels", "GPU", "tokenizer", "no buckets"],
)
def test_promote_is_refused_before_anything_is_loaded_when_the_manifest_does_not_fit(
    site: Site, tmp_path: Path, facts: dict[str, object], words: str
) -> None:
    configs = {path: path.read_bytes() for path in site.repository.glob("*/config.pbtxt")}
    copy = edited(site, tmp_path, **facts)
    try:
        with pytest.raises(ManifestError, match=words):
            site.promote(2)
    finally:
        (site.repository / "encode/2/manifest.json").write_text(copy.read_text())
    assert {path: path.read_bytes() for path in site.repository.glob("*/config.pbtxt")} == configs
    state = read_state(site.repository)
    assert state is not None
    assert state.served == 1


def test_promote_is_refused_when_there_is_no_such_version(site: Site) -> None:
    with pytest.raises(ManifestError, match="no such version: 7; limit: published: 1, 2; to do: make build-engines"):
        site.promote(7)


def test_promote_is_refused_when_the_key_is_missing_or_no_server_answers(site: Site) -> None:
    with pytest.raises(RestrictedError, match="--control-key control=VALUE"):
        promote(site.repository, site.settings, 2, site.url, print)
    with pytest.raises(UnreachableError, match="--offline"):
        promote(site.repository, site.settings, 2, "127.0.0.1:9", print)


@pytest.mark.parametrize("part", ["encoder_16", "encode"])
def test_old_version_answers_on_when_the_new_one_cannot_be_loaded(
    site: Site, expected: dict[int, np.ndarray], part: str
) -> None:
    code = site.repository / part / "2/model.py"
    good = code.read_text()
    # A plain load of an unchanged version does nothing: it is loaded anew from here on.
    site.promote(1, keep_old=False)
    configs = {path: path.read_bytes() for path in site.repository.glob("*/config.pbtxt")}
    with traffic(site.url) as seen:
        code.write_text("raise RuntimeError('planted')\n")
        try:
            with pytest.raises(LoadError, match="planted"):
                site.promote(2)
        finally:
            code.write_text(good)
        time.sleep(0.3)
    assert seen.errors == []
    assert all(near(vector, expected[1][number]) for *_, number, vector in seen.answers)
    assert {path: path.read_bytes() for path in site.repository.glob("*/config.pbtxt")} == configs
    state = read_state(site.repository)
    assert state is not None
    assert state.served == 1


@pytest.mark.parametrize("noticed", ["by its hash", "by the engine"])
def test_old_version_answers_on_when_the_graph_of_the_new_one_is_corrupted(
    site: Site, expected: dict[int, np.ndarray], tmp_path: Path, noticed: str
) -> None:
    graph, manifest = site.repository / "encoder_16/2/model.onnx", site.repository / "encode/2/manifest.json"
    kept, told = tmp_path / "model.onnx", manifest.read_text()
    # Moved, not written to: the lanes share one file.
    graph.rename(kept)
    data = bytearray(kept.read_bytes())
    data[64 : len(data) // 2] = bytes(len(data) // 2 - 64)
    graph.write_bytes(data)
    if noticed == "by the engine":
        # As if it had been published so.
        whole, broken = sha256_of(kept), sha256_of(graph)
        facts = json.loads(told)
        (entry,) = [file for file in facts["files"] if file["path"] == "encoder_16/model.onnx"]
        assert entry["sha256"] == whole
        entry["sha256"] = broken
        manifest.write_text(json.dumps(facts))
    kind, words = (
        (ManifestError, r"model\.onnx of encoder_16 is not the file")
        if noticed == "by its hash"
        else (LoadError, "encoder_16")
    )
    try:
        site.promote(1, keep_old=False)
        with traffic(site.url) as seen, pytest.raises(kind, match=words) as caught:
            site.promote(2)
        print(caught.value)
    finally:
        graph.unlink()
        kept.rename(graph)
        manifest.write_text(told)
    assert seen.errors == []
    assert seen.answers
    assert all(near(vector, expected[1][number]) for *_, number, vector in seen.answers)
    state = read_state(site.repository)
    assert state is not None
    assert state.served == 1


def test_interrupted_promote_is_put_back(
    site: Site, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VersionChange.switch

    def switch(self: VersionChange, version: int) -> float:
        real(self, version)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VersionChange, "switch", switch)
        with pytest.raises(KeyboardInterrupt):
            site.promote(2)
    assert all(near(a, b) for a, b in zip(site.vectors(), expected[1], strict=True))


def test_served_version_is_kept_when_the_server_restarts(site: Site, expected: dict[int, np.ndarray]) -> None:
    site.promote(2)
    assert site.server is not None
    site.server.stop()
    # As `serve` does: the settings still say version 1's model, what is served is version 2.
    built = build_ungated(site.settings)
    assert (built.version, built.served, built.built) == (1, 2, False)
    check_served(site.repository)
    site.start()
    assert all(near(a, b) for a, b in zip(site.vectors(), expected[2], strict=True))
    done = site.rollback()
    assert (done.served, done.lanes_loaded) == (1, False)
    assert read_manifest(site.repository, 1).output.size == 384
