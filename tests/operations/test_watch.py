"""What the launcher finds of a server that is played, and tells on its port; and which process counts as warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from builders.canary import smallest_input as supervisors_input
from builders.health import ModelStatus, Status
from builders.health import metrics_text as supervisors_text
from builders.ports import free_ports
from tests.operations.container import script
from tests.operations.played_server import (
    DEADLINE_S,
    ENTRY,
    LANE,
    NATIVE,
    TENSORS,
    Played,
    look,
    playing_server,
    watching,
)
from tests.tools.played import playing
from tests.tools.waiting import until

watch, endpoint, health, launch = script("watch"), script("endpoint"), script("health"), script("launch")
repository, triton_http = script("repository"), script("triton_http")


@pytest.fixture
def played() -> Iterator[Played]:
    with playing_server() as server:
        yield server


def test_a_model_that_answers_is_ready_and_was_asked_the_smallest_request(played: Played) -> None:
    found = watching(played, *NATIVE)
    look(found)
    found.ask_all()
    assert {name: (state.ready, state.canary) for name, state in found.states().items()} == {
        "encode": (True, "ok"),
        "encoder_32": (True, "ok"),
    }
    assert found.fatal() == {}
    (entry, lane) = (body for _, body in played.asked)
    assert entry["inputs"] == [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["canary"]}]
    assert entry["parameters"]["priority"] == 1
    assert [(tensor["name"], tensor["data"][0]) for tensor in lane["inputs"]] == [("input_ids", 0), ("length", 1)]
    for tensors in TENSORS.values():
        assert [watch.smallest_input(one) for one in tensors] == [supervisors_input(one) for one in tensors]


def test_a_dead_process_is_fatal_and_counted_against_what_triton_has_loaded(played: Played) -> None:
    found = watching(played)
    look(found)
    assert found.fatal() == {}
    played.processes = 1
    look(found)
    assert found.fatal() == {
        "encode": "encode: 0 of 3 processes are left",
        "encoder_32": "encoder_32: 0 of 3 processes are left",
    }
    assert found.states()["encode"].dead == 3
    assert not found.states()["encode"].ready


def test_a_lane_that_a_promote_brings_is_watched_from_then_on(played: Played) -> None:
    models = [ENTRY]
    found = watch.Watch(lambda: models, played.port, watch.WatchSettings())
    look(found)
    assert set(found.states()) == {"encode"}
    models.append(LANE)
    look(found)
    assert set(found.states()) == {"encode", "encoder_32"}


def test_an_entry_that_a_build_publishes_later_is_no_fault_until_it_is_loaded(played: Played) -> None:
    models, other = list(NATIVE), repository.Model("encode_other", True, 0)
    found = watch.Watch(lambda: models, played.port, watch.WatchSettings())
    models.append(other)
    look(found)
    assert set(found.states()) == {"encode", "encoder_32"}
    triton = triton_http.Triton(played.port)
    # With the flags that the launcher gives its server.
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = subprocess.Popen([*wait, "--load-model=encode", "--load-model=encoder_32"])
    try:
        assert health.problem(models, triton, triton, server=server.pid) is None
        played.loaded.remove("encode")
        assert health.problem(models, triton, triton, server=server.pid) == "encode is not ready"
    finally:
        server.kill()
        server.wait()
    played.loaded |= {"encode", "encode_other"}
    look(found)
    assert set(found.states()) == {"encode", "encoder_32", "encode_other"}


def test_an_entry_that_was_promoted_later_and_is_lost_is_not_ready(played: Played) -> None:
    models, other = list(NATIVE), repository.Model("encode_other", True, 0)
    found = watch.Watch(lambda: models, played.port, watch.WatchSettings())
    models.append(other)
    played.loaded.add("encode_other")
    look(found)
    played.loaded.remove("encode_other")
    look(found)
    assert {name: state.ready for name, state in found.states().items()}["encode_other"] is False
    triton = triton_http.Triton(played.port)
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--load-model=encode"])
    try:
        with endpoint.endpoint(0, 0.0, found.states, "127.0.0.1") as port:
            launcher = triton_http.Triton(port)
            assert launcher.get("/readyz").status == 503
            said = health.problem(models, triton, triton, server=server.pid, launcher=launcher)
            assert said == "encode_other is not ready"
            assert health.problem(models, triton, triton, server=server.pid, launcher=launcher, live_only=True) is None
    finally:
        server.kill()
        server.wait()
    # What a promote dropped has no configuration any more.
    models.remove(other)
    look(found)
    assert set(found.states()) == {"encode", "encoder_32"}


def test_a_repository_that_cannot_be_read_changes_nothing(played: Played) -> None:
    looks = iter([[ENTRY, LANE]])

    def models() -> list[Any]:
        for found in looks:
            return found
        raise repository.LaunchError("just being written")

    found = watch.Watch(models, played.port, watch.WatchSettings())
    look(found)
    assert set(found.states()) == {"encode", "encoder_32"}


def test_a_model_that_answers_nobody_hangs_and_is_not_asked_again(played: Played) -> None:
    found = watching(played, NATIVE[1])
    look(found)
    played.delay_s = DEADLINE_S * 2
    found.ask_all()
    assert found.fatal() == {"encoder_32": f"encoder_32 has answered nobody for {DEADLINE_S:g} s"}
    found.ask_all()
    assert found.fatal() == {"encoder_32": "encoder_32 still answers nobody"}
    assert len(played.asked) == 1
    played.delay_s, played.answered = 0.0, 1
    found.ask_all()
    assert found.fatal() == {}
    assert found.states()["encoder_32"].ready


def test_a_model_that_answers_others_meanwhile_is_busy_and_well(played: Played) -> None:
    found = watching(played, NATIVE[0])
    look(found)
    played.delay_s, played.others = DEADLINE_S * 1.5, 3
    # They are answered before ours would be.
    threading.Timer(DEADLINE_S / 2, lambda: setattr(played, "answered", 3)).start()
    found.ask_all()
    assert (found.states()["encode"].canary, found.fatal()) == ("busy", {})
    assert found.states()["encode"].ready


def test_a_queue_that_refuses_is_busy_until_nobody_was_answered_for_the_whole_deadline(played: Played) -> None:
    found = watching(played, NATIVE[0])
    look(found)
    played.status, played.error = 503, "Exceeds maximum queue size"
    found.ask_all()
    assert (found.states()["encode"].canary, found.fatal()) == ("busy", {})
    time.sleep(DEADLINE_S * 1.2)
    found.ask_all()
    assert found.fatal() == {"encode": f"encode refuses requests, and has answered nobody for {DEADLINE_S:g} s"}
    played.answered += 1
    found.ask_all()
    assert (found.states()["encode"].canary, found.fatal()) == ("busy", {})


def test_errors_are_told_from_the_second_on_and_a_new_start_is_not_asked_for(played: Played) -> None:
    found = watching(played, NATIVE[0])
    look(found)
    played.status, played.error = 500, "no such bucket"
    found.ask_all()
    assert found.states()["encode"].ready
    found.ask_all()
    assert not found.states()["encode"].ready
    assert "no such bucket" in found.states()["encode"].said
    assert found.fatal() == {}


def test_a_process_that_does_not_move_is_fatal_when_triton_says_so_twice(played: Played) -> None:
    found = watching(played, NATIVE[1])
    look(found)
    played.status, played.error = 500, "Stub process 'encoder_32_0_0' is not healthy."
    found.ask_all()
    assert found.fatal() == {}
    found.ask_all()
    assert "is not healthy" in found.fatal()["encoder_32"]


def test_a_lane_that_is_not_loaded_is_left_out_and_an_entry_is_not_ready(played: Played) -> None:
    played.loaded = set()
    found = watching(played, *NATIVE)
    look(found)
    found.ask_all()
    assert {name: state.ready for name, state in found.states().items()} == {"encode": False}
    assert played.asked == []


def test_what_is_drained_is_every_entry_that_is_loaded_and_all_before_the_first_look(played: Played) -> None:
    ensemble = repository.Model("ensemble_32", True, 0)
    found = watching(played, ENTRY, LANE, ensemble)
    assert found.entries() == {"encode", "ensemble_32"}
    look(found)
    assert found.entries() == {"encode"}


def test_a_server_that_is_gone_has_no_dead_processes_and_no_ready_entry(played: Played) -> None:
    found = watch.Watch(lambda: (ENTRY, LANE), free_ports().http, watch.WatchSettings())
    began = time.monotonic()
    look(found)
    assert time.monotonic() - began < 2
    assert found.fatal() == {}
    assert not found.states()["encode"].ready


def test_the_watch_goes_on_and_tells_once_when_a_look_fails(played: Played, capfd: pytest.CaptureFixture[str]) -> None:
    looks: list[str] = []

    def models() -> list[Any]:
        looks.append("")
        if 1 < len(looks) < 5:
            raise RuntimeError("a file that nobody foresaw")
        return list(NATIVE)

    found = watch.Watch(models, played.port, watch.WatchSettings(0.01, 0.0, DEADLINE_S))
    found.start(os.getpid())
    assert until(lambda: found.states() and all(state.loaded for state in found.states().values()))
    found.close()
    assert len(looks) >= 5
    (told,) = (line for line in capfd.readouterr().err.splitlines() if "nobody foresaw" in line)
    assert told.startswith("launch: error: a look at the models failed, and is tried again: RuntimeError: a file")
    assert "(test_watch.py:" in told


def test_the_watch_works_by_itself_until_it_is_closed(played: Played) -> None:
    found = watch.Watch(lambda: NATIVE, played.port, watch.WatchSettings(0.02, 0.02, DEADLINE_S))
    found.start(os.getpid())
    deadline = time.monotonic() + 5
    while not all(state.canary == "ok" for state in found.states().values()) or not found.states():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found.close()
    time.sleep(0.2)
    asked = len(played.asked)
    time.sleep(0.2)
    assert len(played.asked) == asked


def test_the_port_tells_liveness_readiness_and_metrics() -> None:
    states = {"encode": watch.ModelState(loaded=True, canary="ok", times=1, canary_s=0.25)}
    with endpoint.endpoint(0, 12.5, lambda: states, "127.0.0.1") as port:
        asking = triton_http.Triton(port)
        assert (asking.get("/healthz").status, asking.get("/readyz").status) == (200, 200)
        states["encode"].canary, states["encode"].times = "failed", 2
        assert (asking.get("/healthz").status, asking.get("/readyz").status) == (200, 503)
        states["encode"].canary, states["encode"].said = "hung", "encode has answered nobody for 30 s"
        assert (asking.get("/healthz").status, asking.get("/readyz").status) == (503, 503)
        assert asking.get("/healthz").json()["models"][0]["text"] == "encode has answered nobody for 30 s"
        page = asking.get("/metrics").text
        with pytest.raises(repository.LaunchError, match=f"HEALTH_PORT {port} cannot be had"):
            endpoint.endpoint(port, 0.0, dict, "127.0.0.1").__enter__()
    assert 'encoder_lanes_supervisor_ready{model="encode"} 0' in page
    assert 'encoder_lanes_supervisor_canary_seconds{model="encode"} 0.25' in page
    assert "encoder_lanes_launcher_start_time_seconds 12.500" in page


def test_its_metrics_are_the_supervisors_with_the_same_words() -> None:
    """Without heals and crash loops, of which a container has none: it ends."""
    theirs = supervisors_text(Status(True, True, (ModelStatus("encode", True),))).splitlines()
    ours = endpoint.metrics_text({"encode": watch.ModelState(loaded=True)}, 0.0).splitlines()
    mine = [line for line in ours if "launcher" not in line]
    assert mine == [line for line in theirs if not re.search("heals_total|crash_loop", line)]


def test_the_health_check_passes_on_what_the_launcher_knows(played: Played) -> None:
    state = watch.ModelState(loaded=True, canary="hung", times=1, said="encoder_32 has answered nobody for 30 s")
    triton = triton_http.Triton(played.port)
    with endpoint.endpoint(0, 0.0, lambda: {"encoder_32": state}, "127.0.0.1") as port:
        asking = triton_http.Triton(port)
        said = health.problem([], triton, triton, server=os.getpid(), launcher=asking, live_only=True)
        assert said == "encoder_32 has answered nobody for 30 s"
        state.canary = "ok"
        assert health.problem([], triton, triton, server=os.getpid(), launcher=asking, live_only=True) is None
    gone = triton_http.Triton(free_ports().http)
    said = health.problem([], triton, triton, server=os.getpid(), launcher=gone, live_only=True)
    assert said is not None
    assert "the launcher does not answer /healthz (HEALTH_PORT)" in said
    with playing(lambda asked: (200, {"status": "well"})) as port:  # somebody else's
        asking = triton_http.Triton(port)
        said = health.problem([], triton, triton, server=os.getpid(), launcher=asking, live_only=True)
    assert said == """the launcher does not answer /healthz (HEALTH_PORT): {"status": "well"}"""


def test_the_health_check_asks_all_entries_at_once_and_tells_of_the_one_that_fails(played: Played) -> None:
    models = [repository.Model(f"encode_{name}", True, 0) for name in "abcd"]
    played.loaded = {model.name for model in models}
    played.delay_s = 1.0
    triton = triton_http.Triton(played.port)
    began = time.monotonic()
    assert health.problem(models, triton, triton, server=os.getpid()) is None
    assert time.monotonic() - began < 3
    assert sorted(model for model, _ in played.asked) == [model.name for model in models]
    played.delay_s, played.status, played.error = 0.0, 500, "no such bucket"
    said = health.problem(models, triton, triton, server=os.getpid())
    assert said == 'encode_a answers a request with 500: {"error": "no such bucket"}'


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "encode is not warm: it has told no metrics yet"),
        ('encoder_lanes_warm_processes_total{model="encode",of="2",version="1"} 1', "1 of 2 processes"),
        ('encoder_lanes_warm_processes_total{model="encode_other",of="1",version="1"} 1', "no metrics"),
        ('encoder_lanes_warm_processes_total{model="encode",of="2",version="1"} 2', None),
        ('encoder_lanes_warm_processes_total{model="encode",of="2",version="1"} 5', None),
        (
            'encoder_lanes_warm_processes_total{model="encode",of="2",version="1"} 2\n'
            'encoder_lanes_warm_processes_total{model="encode",of="4",version="2"} 3',
            "3 of 4 processes",
        ),
    ],
)
def test_an_entry_is_warm_when_all_processes_of_every_version_are(page: str, said: str | None) -> None:
    ensemble = repository.Model("ensemble_32", True, 0)
    found = health.cold_entry([ENTRY, LANE, ensemble], page)
    assert found is None if said is None else said in found


@pytest.mark.parametrize(
    ("name", "text", "value"), [("HEALTH_PORT", "", 8003.0), ("HEALTH_PORT", "0", 0.0), ("CANARY_EVERY", "2.5", 2.5)]
)
def test_a_number_of_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: float
) -> None:
    monkeypatch.setenv(name, text)
    assert launch.read_number(name, 8003, 65535) == value


@pytest.mark.parametrize("text", ["-1", "65536", "often", "1e3"])
def test_a_number_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HEALTH_PORT", text)
    with pytest.raises(repository.LaunchError, match=r"HEALTH_PORT is .*give a number from 0 to 65535"):
        launch.read_number("HEALTH_PORT", 8003, 65535)
