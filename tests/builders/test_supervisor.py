"""The supervisor and its parts against a server that is played: what is told, healed, left alone, and shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from builders.canary import Canary, CanarySettings, Finding, smallest_input
from builders.errors import ServerError
from builders.health import ModelStatus, Status, health_endpoint, metrics_text
from builders.http_api import HttpApi
from builders.model_processes import ModelProcess, ModelProcesses, _Member
from builders.ports import free_ports
from builders.server import TritonServer
from builders.state import Candidate, Served, write_state
from builders.supervise import find_server
from builders.supervisor import Supervisor, SupervisorSettings, beside_a_trial
from builders.triton_log import ServerEvent
from tests.builders.test_server import tiny_repository
from tests.tools.waiting import until

psutil = pytest.importorskip("psutil")

HOST = "127.0.0.1"
TEXT = {"name": "TEXT", "datatype": "BYTES", "shape": [-1, -1]}
QUICK = CanarySettings(every_s=0, deadline_s=0.3)


@dataclass
class Played:
    """A server whose model `encode` does what the test says."""

    port: int = 0
    status: int = 200
    error: str = ""
    delay_s: float = 0.0
    answered: int = 0
    others: int = 0
    asked: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    load_error: str = ""

    def api(self) -> HttpApi:
        return HttpApi(HOST, self.port)

    def answer(self, method: str, path: str) -> tuple[int, object]:
        if path.endswith("/load"):
            self.loads.append(path.split("/")[-2])
            return (400, {"error": self.load_error}) if self.load_error else (200, None)
        if path.endswith("/stats"):
            return 200, {"model_stats": [{"inference_stats": {"success": {"count": self.answered}}}]}
        if path.endswith("/infer"):
            self.asked.append(path)
            time.sleep(self.delay_s)
            self.answered += self.others + (self.status == 200 and self.delay_s < QUICK.deadline_s)
            return (200, {}) if self.status == 200 else (self.status, {"error": self.error})
        assert method == "GET"
        return 200, {"inputs": [TEXT], "outputs": [{"name": "TOKENS"}]}


@pytest.fixture
def played() -> Iterator[Played]:
    server = Played()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer("POST")

        def do_GET(self) -> None:
            self._answer("GET")

        def _answer(self, method: str) -> None:
            status, body = server.answer(method, self.path)
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    http = ThreadingHTTPServer((HOST, 0), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    http.shutdown()
    thread.join()
    http.server_close()


def canary(played: Played) -> Canary:
    return Canary(played.api(), "encode", QUICK, lambda model, finding: None)


# ── the canary ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_canary_finds_a_model_well_when_it_answers(played: Played) -> None:
    one = canary(played)
    assert [one.ask().health for _ in range(2)] == ["ok", "ok"]
    assert (one.last.times, one.last.text) == (2, "")


def test_canary_finds_a_model_failed_when_it_answers_with_an_error(played: Played) -> None:
    played.status, played.error = 500, "the engine is broken"
    assert (found := canary(played).ask()).health == "failed"
    assert found.text == "the engine is broken"


def test_canary_finds_a_model_busy_when_it_is_silent_but_others_are_answered(played: Played) -> None:
    played.delay_s, played.others = 0.6, 3
    # The count moves behind the deadline here: play that it had moved before it.
    one = canary(played)
    real = one._progress
    one._progress = lambda: real() + len(played.asked)  # type: ignore[method-assign]
    found = one.ask()
    assert found.health == "busy"
    assert "others got one" in found.text


def test_canary_finds_a_model_hung_and_asks_no_more_until_it_works_again(played: Played) -> None:
    played.delay_s = 0.6
    one = canary(played)
    assert [one.ask().health for _ in range(3)] == ["hung", "hung", "hung"]
    assert len(played.asked) == 1
    played.delay_s, played.answered = 0.0, 1
    assert one.ask().health == "ok"


def test_canary_finds_a_model_hung_when_its_queue_rejects_and_nobody_is_answered(played: Played) -> None:
    played.status, played.error = 503, "Request timeout expired"
    one = canary(played)
    assert one.ask().health == "busy"
    time.sleep(QUICK.deadline_s)
    assert one.ask().health == "hung"
    played.answered += 1
    assert one.ask().health == "busy"


def test_canary_starts_anew_when_the_model_was_loaded_again(played: Played) -> None:
    played.delay_s = 0.6
    one = canary(played)
    assert one.ask().health == "hung"
    played.delay_s = 0.0
    one.forget()
    # Nothing was computed since: the count alone would still say that it hangs.
    assert one.ask().health == "ok"


def test_canary_finds_a_model_failed_when_no_server_is_there() -> None:
    one = Canary(HttpApi(HOST, 9), "encode", QUICK, lambda model, finding: None)
    assert one.ask().health == "failed"


def test_canary_asks_on_when_what_it_found_could_not_be_told(played: Played) -> None:
    told: list[Finding] = []

    def found(model: str, finding: Finding) -> None:
        told.append(finding)
        raise RuntimeError("planted")

    one = Canary(played.api(), "encode", CanarySettings(every_s=0.01, deadline_s=1.0), found)
    one.start()
    try:
        assert until(lambda: len(told) >= 3)
    finally:
        one.close()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (TEXT, ([1, 1], ["canary"])),
        ({"name": "input_ids", "datatype": "INT32", "shape": [-1, 4]}, ([1, 4], [0, 0, 0, 0])),
        ({"name": "length", "datatype": "INT32", "shape": [-1, 1]}, ([1, 1], [1])),
    ],
)
def test_smallest_input_fits_the_metadata(tensor: dict[str, object], expected: tuple[list[int], list[object]]) -> None:
    made = smallest_input(tensor)
    assert (made["shape"], made["data"]) == expected


# ── the supervisor ───────────────────────────────────────────────────────────────────────────────────────────────────


class Deaths:
    """In place of `ModelProcesses`: processes die when the test says so."""

    def __init__(self) -> None:
        self.next: list[ModelProcess] = []

    def died(self, server: int) -> list[ModelProcess]:
        told, self.next = self.next, []
        return told

    def living(self, model: str, version: int | None = None) -> list[ModelProcess]:
        return []


@dataclass
class Watch:
    supervisor: Supervisor
    deaths: Deaths
    events: list[ServerEvent]

    def die(self, number: int = 0) -> None:
        self.deaths.next = [ModelProcess(10_000_000 + number, f"encode_0_{number}", "encode", 1)]
        self.supervisor._look(1)


@pytest.fixture
def watch(played: Played, tmp_path: Path) -> Watch:
    """Looks are made by the test, not by a thread."""
    (tmp_path / "encode/1").mkdir(parents=True)
    (tmp_path / "encode/1/model.py").touch()
    (tmp_path / "encode/config.pbtxt").write_text('name: "encode"')
    events: list[ServerEvent] = []
    settings = SupervisorSettings(canary=QUICK, loop_heals=3, loop_s=5.0, backoff_s=4.0)
    supervisor = Supervisor(tmp_path, ["encode"], played.api(), lambda: 1, settings, events.append)
    deaths = Deaths()
    supervisor._processes = deaths  # type: ignore[assignment]
    supervisor._started = True
    return Watch(supervisor, deaths, events)


def test_version_is_touched_and_loaded_when_a_process_of_it_died(watch: Watch, played: Played, tmp_path: Path) -> None:
    file = tmp_path / "encode/1/model.py"
    before = file.stat().st_mtime_ns
    time.sleep(0.01)
    watch.die()
    assert file.stat().st_mtime_ns > before
    assert played.loads == ["encode"]
    assert [event.kind for event in watch.events] == ["error", "healed"]
    assert watch.supervisor.status().ready


def test_not_ready_and_tried_again_later_when_the_load_fails(watch: Watch, played: Played) -> None:
    played.load_error = "no more memory"
    watch.die()
    status = watch.supervisor.status()
    assert not status.ready
    assert (status.models[0].dead, status.models[0].heals) == (1, 0)
    assert "no more memory" in status.models[0].text
    watch.supervisor._look(1)
    assert len(played.loads) == 1  # not before its time
    played.load_error = ""
    watch.supervisor._models["encode"].not_before = 0.0
    watch.supervisor._look(1)
    assert len(played.loads) == 2
    assert watch.supervisor.status().ready


def test_said_so_when_the_repository_cannot_be_touched(watch: Watch, played: Played, tmp_path: Path) -> None:
    (tmp_path / "encode/1/model.py").unlink()
    watch.die()
    assert played.loads == []
    assert "could not be healed" in watch.supervisor.status().models[0].text


def test_heals_wait_longer_each_time_and_a_crash_loop_is_told(watch: Watch) -> None:
    for number in range(3):
        watch.die(number)
        watch.supervisor._models["encode"].not_before = 0.0
        watch.supervisor._look(1)
    pauses = []
    model = watch.supervisor._models["encode"]
    for count in range(1, 7):
        model.heals = [time.monotonic()] * count
        pauses.append(watch.supervisor._pause(model))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert watch.supervisor._pause(model, failed=True) == 4.0
    assert any("died 3 times in 5 s" in event.text for event in watch.events)
    status = watch.supervisor.status()
    assert status.models[0].crash_loop
    assert not status.ready
    # Once it has lived for a while it is trusted again.
    model.heals = [time.monotonic() - 6]
    assert watch.supervisor.status().ready


def test_one_failed_canary_is_no_reason_and_two_are(watch: Watch) -> None:
    now = time.monotonic()
    watch.supervisor._found("encode", Finding("failed", 0.1, "changing over", 1, now))
    assert watch.supervisor.status().ready
    watch.supervisor._found("encode", Finding("failed", 0.1, "broken", 2, now))
    assert not watch.supervisor.status().ready
    assert [event.text for event in watch.events] == ["its canary failed: broken"]
    watch.supervisor._found("encode", Finding("ok", 0.1, "", 1, now))
    assert watch.supervisor.status().ready
    assert watch.events[-1].kind == "healed"


def test_what_a_canary_asked_before_a_heal_says_nothing_of_the_new_processes(watch: Watch) -> None:
    asked = time.monotonic()
    watch.die()
    watch.supervisor._found("encode", Finding("hung", 0.3, "silent", 1, asked))
    assert watch.supervisor.status().ready


# ── the processes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_other_threads_see_a_look_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, seen = ModelProcesses(), list[int]()

    def read(pid: int) -> ModelProcess:
        # What another thread gets while the look goes on.
        seen.append(len(processes.living("encode")))
        return ModelProcess(pid, f"encode_0_{pid}", "encode", 1)

    members = [_Member(pid, parent=1, group=1, zombie=False) for pid in (11, 12, 13)]
    monkeypatch.setattr("builders.model_processes._processes", lambda: members)
    monkeypatch.setattr("builders.model_processes._model_process", read)
    assert processes.died(1) == []
    assert seen == [0, 0, 0]
    assert [process.pid for process in processes.living("encode")] == [11, 12, 13]


# ── beside a server of somebody else's ──────────────────────────────────────────────────────────────────────────────


BESIDE = """
import sys
from pathlib import Path
from builders.canary import CanarySettings
from builders.http_api import HttpApi
from builders.supervise import find_server, look_after
from builders.supervisor import SupervisorSettings
pid, repository, port, health = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
settings = SupervisorSettings(look_s=0.2, canary=CanarySettings(0.5, 2.0))
look_after(find_server(pid), repository, ["probe"], HttpApi("127.0.0.1", port), settings,
           lambda line: print(line, flush=True), health_port=health)
"""


def test_server_of_somebody_else_is_healed_and_its_end_noticed(tmp_path: Path) -> None:
    ports, health = free_ports(), free_ports().http
    with TritonServer(tiny_repository(tmp_path), ["probe"], ports=ports, watch=False) as server:
        command = [sys.executable, "-c", BESIDE, str(server.pid), str(tmp_path), str(ports.http), str(health)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as beside:
            try:
                assert until(lambda: answers(f"http://127.0.0.1:{health}/readyz"))
                time.sleep(0.5)
                (stub,) = psutil.Process(server.pid).children()
                stub.kill()
                assert beside.stdout is not None
                lines = [beside.stdout.readline() for _ in range(3)]
                assert "died (probe_0_0)" in lines[1]
                assert lines[2].startswith("healed   probe: new processes answer")
                server.kill()
                assert beside.wait(timeout=10) == 0
            finally:
                beside.kill()


def test_refused_with_a_remedy_when_the_process_is_no_server() -> None:
    with pytest.raises(ServerError, match=r"no tritonserver.*correct --pid"):
        find_server(os.getpid())


def answers(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except urllib.error.URLError:
        return False


# ── the endpoint ─────────────────────────────────────────────────────────────────────────────────────────────────────


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - loopback
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("alive", "ready", "codes"), [(True, True, (200, 200)), (True, False, (200, 503)), (False, False, (503, 503))]
)
def test_endpoint_tells_life_and_readiness_apart(alive: bool, ready: bool, codes: tuple[int, int]) -> None:
    status = Status(alive, ready, (ModelStatus("encode", ready, dead=2, text="two died"),))
    with health_endpoint(HOST, 0, lambda: status) as url:
        assert (get(f"{url}/healthz")[0], get(f"{url}/readyz?verbose")[0]) == codes
        told = json.loads(get(f"{url}/readyz")[1])
        assert told["models"][0]["text"] == "two died"
        assert get(f"{url}/other")[0] == 404
        code, text = get(f"{url}/metrics")
    assert code == 200
    assert 'encoder_lanes_supervisor_dead_processes{model="encode"} 2' in text


def test_metrics_have_help_and_type_for_each_family() -> None:
    text = metrics_text(Status(True, True, (ModelStatus("a", True), ModelStatus("b", False, heals=3))))
    assert text.count("# TYPE") == text.count("# HELP") == 5
    assert 'heals_total{model="b"} 3' in text
    assert text.endswith("\n")


def test_refused_with_a_remedy_when_the_health_port_is_taken() -> None:
    with health_endpoint(HOST, 0, lambda: Status(True, True)) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ServerError, match="HEALTH_PORT"), health_endpoint(HOST, port, lambda: Status(True, True)):
            pass


def test_silent_connection_does_not_hold_the_endpoint_up() -> None:
    import socket

    asked: Callable[[], Status] = lambda: Status(True, True)  # noqa: E731
    with health_endpoint(HOST, 0, asked) as url, socket.create_connection((HOST, int(url.rpartition(":")[2]))):
        began = time.monotonic()
        assert get(f"{url}/healthz")[0] == 200
        assert time.monotonic() - began < 2


def test_canary_asks_the_served_version_of_a_lane_while_another_one_is_on_trial(played: Played, tmp_path: Path) -> None:
    version = partial(beside_a_trial, tmp_path, ("encode", "encode_minilm"))
    lease = Candidate(version=3, share=0.1, until=0.0, deadline_s=5.0, entry={})
    write_state(tmp_path, Served(served=2, lanes=(2,)))
    write_state(tmp_path, Served(served=1, lanes=(1,), candidate=lease), "minilm")
    assert version("encoder_16") is None
    assert version("encoder_minilm_16") == 1
    assert version("encoder_minilm_16_queued") == version("tokenize_minilm_16") == 1
    # These are of one version alone.
    assert version("encode_minilm") is version("ensemble_minilm_16") is None
    asking = Canary(
        played.api(), "encoder_minilm_16", QUICK, lambda model, finding: None, partial(version, "encoder_minilm_16")
    )
    assert asking.ask().health == "ok"
    assert played.asked == ["/v2/models/encoder_minilm_16/versions/1/infer"]
    (tmp_path / ".served.minilm.json").write_text("broken")
    assert version("encoder_minilm_16") is None
