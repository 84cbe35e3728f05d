"""The supervisor and its parts against a server that is played: what is told, healed, left alone, and shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from builders.canary import Finding
from builders.errors import ServerError
from builders.health import ModelStatus, Status, health_endpoint, metrics_text
from builders.model_processes import ModelProcess, ModelProcesses, _Member
from builders.ports import free_ports
from builders.server import TritonServer
from builders.supervise import find_server
from builders.supervisor import Supervisor, SupervisorSettings
from builders.triton_log import ServerEvent
from tests.builders.played_models import QUICK, Played, playing_models
from tests.builders.test_server import tiny_repository
from tests.tools.played import HOST
from tests.tools.waiting import until

psutil = pytest.importorskip("psutil")


@pytest.fixture
def played() -> Iterator[Played]:
    with playing_models() as server:
        yield server


# ── the supervisor ───────────────────────────────────────────────────────────────────────────────────────────────────


class Deaths:
    """In place of `ModelProcesses`: processes die when the test says so."""

    def __init__(self) -> None:
        self.next: list[ModelProcess] = []
        self.alive: list[ModelProcess] = []

    def died(self, server: int) -> list[ModelProcess]:
        told, self.next = self.next, []
        return told

    def living(self, model: str, version: int | None = None) -> list[ModelProcess]:
        return [one for one in self.alive if one.model == model and version in (None, one.version)]


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


def test_model_is_well_again_when_its_bad_version_is_not_called_any_more(watch: Watch) -> None:
    now = time.monotonic()
    watch.supervisor._found("encode", Finding("failed", 0.1, "broken", 2, now))
    watch.supervisor._found("encode", Finding("unknown", 0.0, "the served version does not call it", 1, now))
    assert watch.supervisor.status().ready
    assert watch.events[-1].text == "what its canary found is over: the served version does not call it"


def test_processes_of_the_version_that_hangs_are_killed_and_no_others(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [ModelProcess(20_000_000 + version, f"encode_{version}", "encode", version) for version in (1, 2)]
    watch.deaths.alive, killed = processes, list[int]()
    monkeypatch.setattr(Supervisor, "_kill", staticmethod(killed.append))
    began = time.monotonic()
    for _ in range(2):
        watch.supervisor._models["encode"].hung_since = began - 60
        watch.supervisor._models["encode"].changed = began - 60
        watch.supervisor._found("encode", Finding("hung", 0.3, "silent", 1, began, 2))
    assert set(killed) == {20_000_002}
    # Where the server does not say which version it asked, all may be at fault.
    watch.supervisor._models["encode"].changed = began - 60
    watch.supervisor._found("encode", Finding("hung", 0.3, "silent", 1, began))
    assert set(killed) == {20_000_001, 20_000_002}


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
