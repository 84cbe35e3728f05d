"""Declarative ensembles on a real server: the entry's answers, a queue of their own, priority down to the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto
from tritonclient.utils import InferenceServerException

from builders.canary import Canary, CanarySettings
from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import load_settings
from builders.supervisor import served_version
from builders.versions import promote, record_start, rollback
from tests.integration.conftest import PATIENT
from tests.operations.container import script
from tests.texts import mixed_texts
from tests.tools.load import Call, Sample, open_loop, text_input
from tests.tools.metrics import counter
from tests.tools.repositories import repository, settings_file, timed_repository

SERVICE_S = 0.05
ENSEMBLES = {"buckets": [32, 128], "processes": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The real engine, with ensembles of two buckets."""
    entry = {**PATIENT, "processes": 1}
    folder = tmp_path_factory.mktemp("ensembles")
    built = repository(
        folder, entry=entry, buckets=[32, 128], model={"max_tokens": 128}, ensembles=ENSEMBLES,
        engine={"max_batch_tokens": 1024},
    )  # fmt: skip
    with TritonServer(built.repository, built.models, ports=free_ports(), log_path=folder / "log") as running:
        yield running


def asked(server: TritonServer, model: str, texts: list[str | bytes], **options: Any) -> dict[str, np.ndarray]:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, [text_input(texts)], **options)
    return {name: result.as_numpy(name) for name in ("EMBEDDING", "TOKENS", "CUT")}


def refused(server: TritonServer, model: str, texts: list[str | bytes], **options: Any) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as caught:
        asked(server, model, texts, **options)
    return caught.value


def executed(server: TritonServer, model: str) -> int:
    """Requests that a model has taken."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        statistics = client.get_inference_statistics(model).model_stats
    return sum(int(stat.inference_stats.success.count + stat.inference_stats.fail.count) for stat in statistics)


def test_ensemble_answers_as_the_entry_when_texts_fit_its_bucket(server: TritonServer) -> None:
    texts: list[str | bytes] = ["How far is the moon?", "", *mixed_texts(6, seed=3)]
    entry, ensemble = asked(server, "encode", texts), asked(server, "ensemble_128", texts)
    assert np.allclose(entry["EMBEDDING"], ensemble["EMBEDDING"], atol=2e-5)
    assert np.array_equal(entry["TOKENS"], ensemble["TOKENS"])
    assert np.array_equal(entry["CUT"], ensemble["CUT"])
    assert entry["CUT"].max() > 0


def test_text_cut_or_refused_when_it_is_longer_than_the_bucket(server: TritonServer) -> None:
    long = "word " * 60
    cut = asked(server, "ensemble_32", [long])
    assert (cut["TOKENS"].tolist(), cut["CUT"].tolist()) == ([[32]], [[30]])
    same = asked(server, "encode", ["word " * 30])
    assert np.allclose(cut["EMBEDDING"], same["EMBEDDING"], atol=2e-5)
    error = refused(server, "ensemble_32", [long], parameters={"truncate": "error"})
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert "62 tokens; limit: 32" in error.message()


@pytest.mark.parametrize(
    ("texts", "parameters", "words"),
    [
        ([b"\xff"], {}, "text 0 is not UTF-8"),
        (["good"], {"truncate": "chunk"}, "send it to the entry"),
        (["good"], {"truncate": "middle"}, "'middle'"),
        (["good"], {"dimensions": 12}, "allowed: 384"),
        (["good"] * 9, {}, "batch-size must be <= 8"),
    ],
    ids=["not-utf8", "chunk", "unknown-truncate", "dimensions", "9-texts"],
)
def test_request_refused_as_invalid_when_it_is_bad(
    server: TritonServer, texts: list[str | bytes], parameters: dict[str, Any], words: str
) -> None:
    error = refused(server, "ensemble_128", texts, parameters=parameters)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert words in error.message()


def test_request_of_no_rows_refused_when_the_entry_would_never_answer_it(server: TritonServer) -> None:
    # Triton 2.51 loses a request of shape [0, 0] to a Python model that takes shapes freely (docs/reliability.md).
    tensor = grpc.InferInput("TEXT", [0, 0], "BYTES")
    tensor.set_data_from_numpy(np.empty((0, 0), dtype=np.object_))
    with grpc.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("ensemble_128", [tensor], client_timeout=5)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_queues_of_the_entrys_models_not_touched_when_the_ensemble_is_called(server: TritonServer) -> None:
    own = ("encode", "encoder_32", "encoder_128")
    before = {model: executed(server, model) for model in own}
    queued = executed(server, "encoder_128_queued")
    samples = open_loop(server.grpc_url, [Call((f"text {n}",), model="ensemble_128") for n in range(30)])
    assert [sample.error for sample in samples if sample.error] == []
    # The entry wakes itself up after its own work; it has had none.
    assert {model: executed(server, model) for model in own} == before
    assert executed(server, "encoder_128_queued") >= queued + 30


def test_configuration_has_the_entrys_queue_and_the_lanes_engine_when_queued(server: TritonServer) -> None:
    def config(model: str) -> Any:
        text = (server.repository / model / "config.pbtxt").read_text(encoding="utf-8")
        return text_format.Parse(text, proto.ModelConfig())

    entry, queued, lane = config("encode"), config("encoder_128_queued"), config("encoder_128")
    assert queued.dynamic_batching == entry.dynamic_batching
    assert queued.parameters["lane"] == lane.parameters["lane"]
    assert queued.max_batch_size == lane.max_batch_size
    assert not config("tokenize_128").dynamic_batching.HasField("default_queue_policy")
    files = [server.repository / model / "1" / "model.onnx" for model in ("encoder_128", "encoder_128_queued")]
    assert files[0].stat().st_ino == files[1].stat().st_ino


# A queue of known service time; these tests measure times, and run alone.


def timed(folder: Path, waker: str) -> Any:
    """Lanes that take 50 ms a batch of 32. The queued one wakes itself, or as with a native engine `tokenize` does."""
    entry = {
        "processes": 1,
        "batch": 32,
        "interactive": {"timeout_ms": 2000, "queue_size": 700},
        "background": {"timeout_ms": 10_000, "queue_size": 700},
    }
    built = timed_repository(
        folder, SERVICE_S, entry=entry, buckets=[32], model={"max_tokens": 32}, ensembles={"buckets": [32]},
        lanes={"short": {"batch": 32}}, engine={"max_batch": 32, "max_batch_tokens": 1024},
    )  # fmt: skip
    if waker == "tokenize":
        for model, text, instead in (
            ("tokenize_32", '\\"wake_after_ms\\": 0,', '\\"wake_after_ms\\": 2.0,'),
            ("encoder_32_queued", 'string_value: "2"', 'string_value: "0"'),
        ):
            config = built.repository / model / "config.pbtxt"
            before = config.read_text(encoding="utf-8")
            assert text in before
            config.write_text(before.replace(text, instead), encoding="utf-8")
    return built


@pytest.fixture(scope="module", params=["queued", pytest.param("tokenize", marks=pytest.mark.slow)])
def busy_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp(f"timed-{request.param}")
    built = timed(folder, request.param)
    with TritonServer(built.repository, built.models, ports=free_ports(), log_path=folder / "log") as running:
        open_loop(running.grpc_url, [Call(("warm",), model="ensemble_32")])
        yield running


def of(samples: list[Sample], kind: str) -> list[float]:
    return [sample.latency for sample in samples if sample.call.kind == kind]


@pytest.mark.alone
def test_interactive_request_overtakes_when_600_wait_in_the_ensembles_queue(busy_server: TritonServer) -> None:
    calls = [Call((f"text {n}",), {"priority": 2}, model="ensemble_32", kind="backlog") for n in range(600)]
    # By then all of the backlog is tokenised; it takes 19 batches of 50 ms.
    interactive = Call(("now",), {"priority": 1}, at=0.4, model="ensemble_32", kind="interactive")
    samples = open_loop(busy_server.grpc_url, [*calls, interactive])
    assert [sample.error for sample in samples if sample.error] == []
    (own,) = of(samples, "interactive")
    assert sum(latency > 0.4 + own for latency in of(samples, "backlog")) >= 100
    assert own < 0.6 * (max(of(samples, "backlog")) - 0.4)


@pytest.mark.alone
def test_queue_refuses_at_once_when_it_is_full(busy_server: TritonServer) -> None:
    calls = [Call((f"text {n}",), {"priority": 2}, model="ensemble_32") for n in range(1200)]
    samples = open_loop(busy_server.grpc_url, calls)
    refused = [(sample.error or "").replace("Maximum", "maximum") for sample in samples if sample.error]
    # Those of the queue go on while the others come.
    assert 1 <= len(refused) <= 550
    assert {
        message for message in refused if "UNAVAILABLE" not in message or "maximum queue size" not in message
    } == set()


def stalled(server: TritonServer, bursts: int) -> int:
    """How many bursts of 150 took half a second more than usual."""
    taken = []
    for number in range(bursts):
        calls = [Call((f"{number} {n}",), {"priority": 2}, model="ensemble_32") for n in range(150)]
        taken.append(max(sample.latency for sample in open_loop(server.grpc_url, calls)))
        time.sleep(0.02)
    return sum(seconds > np.percentile(taken, 25) + 0.4 for seconds in taken)


@pytest.mark.alone
def test_no_burst_stalls_when_the_queue_is_woken(busy_server: TritonServer) -> None:
    # Without a wake-up a third of the bursts and more stall (docs/queue.md); a busy machine gets a second round.
    assert stalled(busy_server, 20) <= 1 or stalled(busy_server, 20) <= 1


@pytest.mark.alone
def test_queue_not_woken_when_nothing_comes(busy_server: TritonServer) -> None:
    open_loop(busy_server.grpc_url, [Call(("text",), model="ensemble_32")])
    time.sleep(1.2)
    before = counter(busy_server.metrics_url, "encoder_lanes_wakeups_total")
    time.sleep(0.5)
    assert counter(busy_server.metrics_url, "encoder_lanes_wakeups_total") == before > 0


# Versions


@contextmanager
def asking(server: TritonServer) -> Iterator[list[str]]:
    """Four clients ask the ensemble as fast as they can while the block runs; yields what went wrong."""
    problems: list[str] = []
    over = threading.Event()

    def ask() -> None:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            while not over.is_set():
                try:
                    found = client.infer("ensemble_32", [text_input(["word " * 60])]).as_numpy("TOKENS")[0, 0]
                    if found not in (30, 32):
                        problems.append(f"{found} tokens")
                except InferenceServerException as error:
                    problems.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield problems
    finally:
        over.set()
        for thread in threads:
            thread.join()


def not_well(server: TritonServer, repository: Path) -> dict[str, str]:
    """Of the loaded models those that the canaries of supervisor and launcher do not find well, with what they say."""
    watch, models = script("watch"), script("repository").read_models(repository)
    launcher = watch.Watch(lambda: models, server.ports.http)
    launcher.look(server.pid)
    launcher.ask_all()
    states = {name: state for name, state in launcher.states().items() if state.loaded}
    assert {"encode", "encoder_32", "tokenize_32", "encoder_32_queued"} <= set(states)
    found = {}
    for name, state in states.items():
        version = partial(served_version, server.http, ("encode",), name)
        mine = Canary(server.http, name, CanarySettings(), lambda *_: None, version).ask()
        if (mine.health, state.canary) != ("ok", "ok"):
            found[name] = f"{mine.health}: {mine.text}; {state.canary}: {state.said}"
    return found


@pytest.mark.slow
def test_ensemble_changes_version_with_the_entry_when_promoted_and_rolled_back(tmp_path: Path) -> None:
    same = {"buckets": [32], "entry": {**PATIENT, "processes": 1}}
    first = repository(tmp_path, **same, model={"max_tokens": 32}, ensembles={"buckets": [32], "processes": 1})
    with TritonServer(first.repository, first.models, ports=free_ports(), log_path=tmp_path / "log") as server:
        record_start(first.repository)
        second = repository(tmp_path, **same, model={"max_tokens": 30}, ensembles={"buckets": [32], "processes": 1})
        assert (second.version, second.served) == (2, 1)
        settings = load_settings(settings_file(tmp_path, "deploy.cpu.yaml", **same, model={"max_tokens": 30}))

        def tokens(model: str) -> int:
            return int(asked(server, model, ["word " * 60])["TOKENS"][0, 0])

        def control(version: int | None) -> None:
            if version is None:
                rollback(first.repository, settings, server.grpc_url, print)
            else:
                promote(first.repository, settings, version, server.grpc_url, print)

        assert (tokens("encode"), tokens("ensemble_32")) == (32, 32)
        with asking(server) as problems:
            control(2)
            assert (tokens("encode"), tokens("ensemble_32")) == (30, 30)
            assert not_well(server, first.repository) == {}
            control(None)
        assert problems == []
        assert (tokens("encode"), tokens("ensemble_32")) == (32, 32)
        # The lanes of the version that it went back from stay loaded, whatever they are like.
        assert served_version(server.http, ("encode",), "encoder_32") == 1
        assert server.http.versions("encoder_32") == (1, 2)
        counts = [server.http.answered("encoder_32", version) for version in (1, 2)]
        assert min(counts) > 0
        assert server.http.answered("encoder_32") == sum(counts)
        # A version without an ensemble takes it away, and the way back brings it again.
        third = repository(tmp_path, **same, model={"max_tokens": 28})
        control(third.version)
        assert tokens("encode") == 28
        assert "no available versions" in refused(server, "ensemble_32", ["text"]).message()
        # Its steps stay for the way back, in a version that nobody calls: an older one, or a bad newer one.
        assert server.http.lanes("encode", third.version) == ("encoder_32",)
        uncalled = dict.fromkeys(
            ("tokenize_32", "encoder_32_queued"), "unknown: the served version does not call it; unknown: "
        )
        assert server.http.versions("tokenize_32") == (1,)
        assert not_well(server, first.repository) == uncalled
        control(2)
        assert not_well(server, first.repository) == {}
        control(None)
        assert tokens("encode") == 28
        assert server.http.versions("tokenize_32") == (2,)
        assert not_well(server, first.repository) == uncalled
        control(None)
        assert (tokens("encode"), tokens("ensemble_32")) == (30, 30)
