"""The server's real command from docker-compose.yml, and what stands around it: health, Prometheus, the TLS proxy."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from builders.control import ModelControl
from builders.errors import RestrictedError
from tests.operations.conftest import PATIENT, Watched
from tests.operations.container import DOCKER, KEY, Container, compose, container, script
from tests.operations.prometheus import Prometheus
from tests.operations.proxy import Proxy, name_server, running_proxy
from tests.operations.test_image import tool
from tests.operations.test_kubernetes import adapter_rule
from tests.tools.load import Call, open_loop, text_input
from tests.tools.repositories import ROOT, timed_repository
from tests.tools.waiting import until

SMALL: dict[str, Any] = {"buckets": [32, 64], "model": {"max_tokens": 64}, "entry": PATIENT}


@pytest.fixture(scope="module")
def server(watched: Watched) -> Container:
    return watched.server


@pytest.fixture(scope="module")
def slow_lanes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose lanes take half a second a batch."""
    return timed_repository(tmp_path_factory.mktemp("container"), 0.5, **SMALL).repository


@pytest.fixture(scope="module")
def proxy(server: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """nginx with the service's configuration, in front of the server."""
    with name_server() as names, running_proxy(tmp_path_factory.mktemp("proxy"), server.ports, names.at) as found:
        yield found


def request_body(text: str) -> str:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    return json.dumps({"parameters": {"priority": 1}, "inputs": [tensor]})


def test_the_real_command_is_healthy_and_warm_and_shows_quantiles(server: Container, prometheus: Prometheus) -> None:
    # Prometheus starts with this test, and has its samples by the time others ask for them.
    assert prometheus.answers()
    assert server.health() == (0, "healthy\n")
    assert server.health("--live") == (0, "healthy\n")
    # Ready comes a moment before every process has made its first calls.
    assert until(lambda: server.health("--warm") == (0, "healthy\n"))
    started = server.log.read_text(encoding="utf-8")
    for flag in ("summary_latencies", "thread-pool-size"):
        assert flag in " ".join(compose()["services"]["triton-cpu"]["command"])
    assert '"source": "launch", "message": "tritonserver ' in started
    assert KEY[1] not in started
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=5) as answer:
        assert 'nv_inference_request_summary_us{model="encode",version="1",quantile="0.99"}' in answer.read().decode()


def test_the_launcher_tells_on_its_own_port_that_every_model_is_well(server: Container) -> None:
    launcher = script("triton_http").Triton(server.health_port)
    assert until(lambda: launcher.get("/readyz").ok)
    models = {"encode", "encoder_32", "encoder_64"}
    assert until(
        lambda: {one["model"] for one in launcher.get("/readyz").json()["models"] if one["canary"] == "ok"} == models
    )
    assert launcher.get("/healthz").ok
    assert launcher.get("/else").status == 404


def test_apis_that_change_the_server_need_the_key(server: Container) -> None:
    url = f"127.0.0.1:{server.ports.grpc}"
    with ModelControl(url) as control, pytest.raises(RestrictedError, match="--control-key control-key="):
        control.unload("encode")
    with ModelControl(url, key=KEY) as control:
        assert control.ready_versions("encode") == (1,)
    http_api = script("triton_http").Triton(server.ports.http)
    for path in ("/v2/repository/index", "/v2/repository/models/encode/unload", "/v2/logging"):
        assert http_api.post(path).status == 403, path
    keyed = script("triton_http").Triton(server.ports.http, key=KEY)
    assert keyed.post("/v2/repository/index").ok


def test_a_full_queue_is_healthy_while_others_are_answered_and_ill_when_nobody_is(server: Container) -> None:
    """The queue's rejection is put in the place of the server's own answer; all else is the real server."""
    health, triton_http = script("health"), script("triton_http")
    models = script("repository").read_models(server.repository)

    class Full(triton_http.Triton):  # type: ignore[misc, name-defined]
        served = 0

        def post(self, path: str, body: object = None) -> Any:
            for _ in range(self.served):
                super().post(path, body)
            return triton_http.Answer(503, '{"error":"[request id: <id_unknown>] Exceeds maximum queue size"}')

    class Still(triton_http.Triton):  # type: ignore[misc, name-defined]
        """Metrics of one moment: the launcher's canary, which is answered, does not show."""

        page = None

        def get(self, path: str) -> Any:
            self.page = self.page or super().get(path)
            return self.page

    real, full = triton_http.Triton(server.ports.http), Full(server.ports.http)
    metrics = triton_http.Triton(server.ports.metrics)
    said = health.problem(models, full, Still(server.ports.metrics), server=server.server)
    assert said is not None
    assert "Exceeds maximum queue size" in said
    assert "nobody else" in said
    full.served = 1
    assert health.problem(models, full, metrics, server=server.server) is None
    assert health.problem(models, real, metrics, server=None) == "tritonserver is not running"


@pytest.mark.slow
def test_a_model_that_changes_over_is_not_taken_for_a_dead_one(server: Container) -> None:
    processes, models = script("processes"), script("repository").read_models(server.repository)
    asking = script("triton_http").Triton(server.ports.http)
    loading = script("triton_http").Triton(server.ports.http, key=KEY, timeout_s=60.0)
    looks: list[list[str]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            looks.append(processes.dead_models(server.server, models, asking))

    config = server.repository / "encode" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        # The same processes, one process less, and both again: the file says what comes before Triton has it.
        for now, count in ((text, 2), (text.replace("count: 2", "count: 1"), 1), (text, 2)):
            before = server.stubs("encode")
            config.write_text(now, encoding="utf-8")
            time.sleep(1.0)
            # Triton does nothing for a load where no file of the version has changed.
            os.utime(server.repository / "encode" / "1" / "model.py")
            assert loading.post("/v2/repository/models/encode/load").ok
            assert until(lambda before=before: not set(server.stubs("encode")) & set(before))
            assert len(server.stubs("encode")) == count
    finally:
        done.set()
        thread.join()
    assert len(looks) > 10
    assert [look for look in looks if look] == []


def test_the_proxy_gives_tls_to_http_and_closes_what_changes_the_server(server: Container, proxy: Proxy) -> None:
    connection = http.client.HTTPSConnection(
        "localhost", proxy.http, context=ssl.create_default_context(cafile=str(proxy.certificate)), timeout=10
    )

    def ask(method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection.request(method, path, body=body, headers={KEY[0]: KEY[1], "Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    status, body = ask("POST", "/v2/models/encode/infer", request_body("a text of the customer"))
    assert status == 200
    assert {output["name"] for output in json.loads(body)["outputs"]} == {"EMBEDDING", "TOKENS", "CUT"}
    assert ask("GET", "/v2/models/encode/ready")[0] == 200
    for path in ("/v2/repository/index", "/v2/repository/models/encode/unload", "/v2/logging", "/metrics"):
        assert ask("POST", path, "{}")[0] == 404, path
    assert ask("POST", "/v2/models/encode/trace/setting", "{}")[0] == 404
    assert ask("POST", "/v2/models/encode/infer", "x" * (5 << 20))[0] == 413
    lines = [line for line in proxy.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    assert json.loads(lines[0])["status"] == 200
    assert "customer" not in proxy.log.read_text(encoding="utf-8")


def test_the_proxy_gives_tls_to_grpc_and_closes_what_changes_the_server(server: Container, proxy: Proxy) -> None:
    with triton.InferenceServerClient(
        f"localhost:{proxy.grpc}", ssl=True, root_certificates=str(proxy.certificate)
    ) as client:
        result = client.infer("encode", [text_input(["over TLS"])], priority=1)
        assert result.as_numpy("EMBEDDING").shape == (1, 384)
        with pytest.raises(InferenceServerException, match="not offered here"):
            client.get_model_repository_index(headers={f"triton-grpc-protocol-{KEY[0]}": KEY[1]})


def test_prometheus_answers_and_so_does_the_autoscalers_query(watched: Watched, prometheus: Prometheus) -> None:
    # Requests between two samples: a counter that never moved since the first one has no rate.
    own = f'job="triton", instance="{watched.target}"'
    assert until(lambda: prometheus.query(f'nv_inference_request_success{{model="encode", {own}}}'))
    calls = [Call((f"number {number}",), {"priority": 1}, at=number / 50) for number in range(50)]
    assert [sample.error for sample in open_loop(f"127.0.0.1:{watched.server.ports.grpc}", calls) if sample.error] == []
    assert prometheus.value(f"up{{{own}}}") == 1
    rule = adapter_rule()
    # What the adapter fills in, with labels that this Prometheus has.
    text = rule["metricsQuery"].replace("<<.LabelMatchers>>", own).replace("<<.GroupBy>>", "instance")
    assert rule["seriesQuery"].split("{")[0] in text
    assert until(lambda: [found for found in prometheus.query(text) if float(found["value"][1]) > 0], 30.0)
    # The window is 10 ms, and nothing else makes a request wait here.
    assert 0.1 < prometheus.value(text) < 60_000
    # The page of these tests alone: the name `door`, which nobody has here, is no target that is down.
    assert len(prometheus.query('up{job="door"}')) == 1


def test_promtool_accepts_the_configuration() -> None:
    path = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    command = [tool("promtool", "prometheus (apt)"), "check", "config", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_sigterm_answers_every_accepted_request_and_ends_with_0(slow_lanes: Path) -> None:
    """Lanes of half a second a batch: at the signal all 40 requests are accepted, and most are not answered."""
    with container(slow_lanes) as started:
        calls = [Call((f"the number {number}",), at=number / 100) for number in range(40)]
        ended: list[float] = []

        def stop() -> None:
            time.sleep(0.5)
            ended.append(time.monotonic())
            started.process.send_signal(signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        samples = open_loop(f"127.0.0.1:{started.ports.grpc}", calls)
        thread.join()
        assert [sample.error for sample in samples if sample.error] == []
        assert sum(sample.call.at + sample.latency > 0.5 for sample in samples) >= 20
        assert started.wait_ended(30) == 0
        assert "launch: every accepted request is answered" in started.log.read_text(encoding="utf-8")
        assert time.monotonic() - ended[0] < 70  # stop_grace_period


def test_a_dead_model_process_is_ill_though_triton_says_ready_and_ends_the_container(slow_lanes: Path) -> None:
    with container(slow_lanes) as started:
        (stub,) = started.stubs("encoder_64")
        # The launcher sleeps meanwhile: it would end the server under the health check's feet.
        started.process.send_signal(signal.SIGSTOP)
        os.kill(stub, signal.SIGKILL)
        code, said = started.health("--live")
        assert code == 1
        assert "encoder_64: 0 of 1 processes are left" in said
        triton_http = script("triton_http").Triton(started.ports.http)
        assert triton_http.get("/v2/models/encoder_64/ready").ok
        assert triton_http.get("/v2/health/ready").ok
        started.process.send_signal(signal.SIGCONT)
        assert started.wait_ended(40) == 1
        log = started.log.read_text(encoding="utf-8")
        assert "launch: only a new start heals this: encoder_64: 0 of 1 processes are left" in log


@pytest.mark.slow
def test_a_model_that_hangs_ends_the_container_though_triton_says_ready(slow_lanes: Path, tmp_path: Path) -> None:
    repository, hangs = tmp_path / "model_repository", tmp_path / "hangs"
    shutil.copytree(slow_lanes, repository)
    lane = repository / "encoder_64" / "1" / "model.py"
    wait = f"while __import__('os').path.exists({str(hangs)!r}):\n            time.sleep(0.1)\n        time.sleep("
    lane.write_text(lane.read_text(encoding="utf-8").replace("time.sleep(", wait, 1), encoding="utf-8")
    with container(repository, environment={"CANARY_EVERY": "1"}) as started:
        assert until(lambda: started.health("--warm")[0] == 0)
        (stub,) = started.stubs("encoder_64")
        hangs.touch()
        began = time.monotonic()
        assert started.wait_ended(90) == 1
        # Half a minute without an answer to anybody, then the drain.
        assert time.monotonic() - began > 30
        log = started.log.read_text(encoding="utf-8")
        assert "launch: only a new start heals this: encoder_64 has answered nobody for 30 s" in log
        assert f"launch: encoder_64 hangs: its process {stub} is killed" in log
        assert "launch: every accepted request is answered" in log


@pytest.mark.slow
def test_a_model_process_that_does_not_move_ends_the_container(slow_lanes: Path) -> None:
    """Triton answers for it with errors, and neither starts another nor calls the model unready."""
    with container(slow_lanes, environment={"CANARY_EVERY": "1"}) as started:
        (stub,) = started.stubs("encoder_64")
        os.kill(stub, signal.SIGSTOP)
        assert started.wait_ended(60) == 1
        log = started.log.read_text(encoding="utf-8")
        assert "launch: only a new start heals this: encoder_64" in log
        assert "is not healthy" in log
        assert f"launch: encoder_64 hangs: its process {stub} is killed" in log


@pytest.mark.slow
def test_where_an_orchestrator_acts_the_launcher_only_says_what_is_dead(slow_lanes: Path) -> None:
    """As on Kubernetes: the liveness probe fails, and the server stays until somebody ends it."""
    with container(slow_lanes, environment={"ON_DEAD_PROCESS": "report"}) as started:
        launcher = script("triton_http").Triton(started.health_port)
        assert until(lambda: launcher.get("/readyz").ok)
        (stub,) = started.stubs("encoder_64")
        os.kill(stub, signal.SIGKILL)
        assert until(lambda: launcher.get("/healthz").status == 503)
        assert launcher.get("/readyz").status == 503
        assert 'encoder_lanes_supervisor_dead_processes{model="encoder_64"} 1' in launcher.get("/metrics").text
        assert 'encoder_lanes_supervisor_ready{model="encode"} 1' in launcher.get("/metrics").text
        assert started.health("--live")[0] == 1
        assert started.process.poll() is None
        assert "launch: only a new start heals this: encoder_64" in started.log.read_text(encoding="utf-8")
        began = time.monotonic()
        started.process.send_signal(signal.SIGTERM)
        assert started.wait_ended(60) == 1
        # Triton would wait its whole exit-timeout-secs for what the dead process held.
        assert time.monotonic() - began < 25


def test_a_health_port_that_is_taken_ends_the_launcher_with_what_to_do(slow_lanes: Path) -> None:
    with closing(socket.socket()) as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        run = subprocess.run(
            [sys.executable, str(DOCKER / "launch.py"), f"--model-repository={slow_lanes}"],
            env={**os.environ, "HEALTH_PORT": str(port)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert run.returncode == 2
    assert f"HEALTH_PORT {port} cannot be had" in run.stderr
