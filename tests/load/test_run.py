"""The generator's processes against servers whose answers take known times."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from clients import EncoderError, InvalidInput, Tls
from clients.load.null_server import null_server, null_servers
from clients.load.plan import Plan, Segment, closed_plan, open_plan, parse_classes
from clients.load.run import Crew, Interrupted, LoadOptions, run_load
from clients.load.summary import summarise
from clients.load.target import Target
from clients.load.texts import TextSource
from clients.load.worker import Progress
from tests.clients.certificates import make_certificates
from tests.clients.fake_triton import serve
from tests.load.servers import timed_server
from tests.tools.played import Asked, playing
from tests.tools.waiting import until

SOURCE = TextSource()
ONE = LoadOptions(processes=1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def steady(rate: float, seconds: float, **more: object) -> Plan:
    return open_plan(SOURCE, [Segment(rate, rate, seconds)], arrivals="constant", **more)  # type: ignore[arg-type]


def test_a_server_that_stalls_for_a_second_shows_in_the_p99() -> None:
    # Whoever arrives in the stall waits for its end. A client that waits for each answer would meet it once.
    plan = steady(50, 4)
    with timed_server(delay=lambda at: 2.0 - at if 1.0 <= at < 2.0 else 0.0) as server:
        records = run_load(Target(server.url), plan, LoadOptions(processes=2))
    summary = summarise(records, plan)
    slow = (records.latency_ms() > 100).sum()
    assert len(records) == 200
    assert records.ok().all()
    assert 40 <= slow <= 60, "a second of stall at 50 a second, all but its last tenth"
    assert summary.overall.p99 > 900
    assert summary.overall.p50 < 100


def test_a_generator_that_cannot_keep_up_says_so() -> None:
    plan = steady(50_000, 0.1)
    with null_server() as url:
        summary = summarise(run_load(Target(url), plan, ONE), plan)
    assert summary.late_p99_ms > 10
    assert not summary.valid
    assert "generator was the bottleneck" in summary.warnings[0]


def test_each_process_has_a_server_of_its_own_when_several_are_given() -> None:
    plan = steady(50, 0.4)
    with timed_server() as first, timed_server() as second:
        records = run_load([Target(first.url), Target(second.url)], plan, LoadOptions(processes=2))
        assert records.ok().all()
        assert (len(first.inputs), len(second.inputs)) == (10, 10)
        run_load([Target(first.url), Target(second.url)], plan, ONE)
        assert (len(first.inputs), len(second.inputs)) == (30, 10)


def test_servers_that_do_nothing_are_processes_of_their_own_and_gone_afterwards() -> None:
    with null_servers(2) as urls:
        children = [child for child in multiprocessing.active_children() if child.name == "null server"]
        assert len(set(urls)) == len(children) == 2
        assert run_load([Target(url) for url in urls], steady(50, 0.2), LoadOptions(processes=2)).ok().all()
    assert not any(child.is_alive() for child in children)


def test_question_goes_before_each_text_when_the_model_reads_pairs() -> None:
    plan = steady(50, 0.1)
    with timed_server() as server:
        assert run_load(Target(server.url, question="What is it?"), plan, ONE).ok().all()
        assert run_load(Target(server.url), plan, ONE).ok().all()
    texts = sorted(request.text for request in plan.requests)
    pairs, singles = server.inputs[: len(texts)], server.inputs[len(texts) :]
    assert sorted(one["TEXT_PAIR"] for one in pairs) == texts
    assert {one["TEXT"] for one in pairs} == {"What is it?"}
    assert sorted(one["TEXT"] for one in singles) == texts
    assert all(set(one) == {"TEXT"} for one in singles)


def test_priorities_and_errors_are_sent_and_counted_by_kind() -> None:
    failures = {
        3: (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"),
        7: (grpc.StatusCode.UNAVAILABLE, "Request timeout expired"),
        9: (grpc.StatusCode.INTERNAL, "the engine broke"),
    }
    plan = steady(100, 0.5, classes=parse_classes(["interactive 60%", "background 20%", "other 20%"]))
    with timed_server(fail=failures.get) as server:
        records = run_load(Target(server.url), plan, ONE)
    summary = summarise(records, plan)
    assert dict(summary.errors) == {"Overloaded": 1, "QueueTimeout": 1, "ServerFailure": 1}
    assert (summary.overall.requests, summary.overall.failed) == (50, 3)
    assert sorted(server.priorities) == sorted(request.priority for request in plan.requests)
    # The request parameter `class`, by which the long lane orders; nothing where no priority is sent.
    asked = {0: "", 1: "interactive", 2: "background"}
    assert [asked[priority] for priority in server.priorities] == server.levels
    assert {one.name for one in summary.classes} == {"interactive", "background", "other"}
    assert set(np.array(records.answered)[records.ok()]) == {7}


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    plan = closed_plan(SOURCE, 10, 1.5)
    with timed_server(delay=lambda at: 0.1) as server:
        records = run_load(Target(server.url), plan, LoadOptions(processes=2, clients=5))
    summary = summarise(records, plan, clients=5)
    assert server.most_at_once == 5
    assert 20 < summary.throughput <= 50, "5 clients of 100 ms"
    assert summary.overall.p50 == pytest.approx(100, abs=60)


def test_a_client_of_a_closed_loop_pauses_after_a_failure() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused at once
        target = Target(f"127.0.0.1:{held.getsockname()[1]}", deadline_s=2)
        records = run_load(target, closed_plan(SOURCE, 5, 0.4), LoadOptions(1, clients=2))
    assert set(records.status) == {"ServerUnavailable"}
    assert len(records) <= 2 * 41
    assert "cannot be reached" in records.said["ServerUnavailable"]


def test_an_encrypted_server_is_called_with_certificates_and_keys(certificates: Path) -> None:
    pems = [(certificates / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
    tls = Tls(*(certificates / name for name in ("ca.pem", "client.pem", "client.key")))
    with serve(grpc.ssl_server_credentials([(pems[0], pems[1])], pems[2], True)) as server:
        target = Target(f"grpcs://{server.url}", headers=(("authorization", "Bearer key"),), tls=tls)
        assert run_load(target, steady(50, 0.1), ONE).ok().all()
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer key"}


def test_the_generators_own_share_of_a_core_is_measured_and_the_start_noted() -> None:
    began = time.monotonic()
    with timed_server(delay=lambda at: 0.05) as server:
        records = run_load(Target(server.url), closed_plan(SOURCE, 5, 0.5), LoadOptions(1, clients=2))
    assert 0 < records.busy < 0.9
    assert began < records.start < time.monotonic() - 0.5


def test_no_server_is_an_error_of_each_request_and_not_of_the_run() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        plan = steady(20, 0.2)
        records = run_load(Target(f"127.0.0.1:{held.getsockname()[1]}", deadline_s=2), plan, ONE)
    assert set(records.status) <= {"ServerUnavailable", "DeadlineExceeded"}
    assert len(records) == 4


@contextmanager
def openai_server(seen: list[Asked]) -> Iterator[str]:
    def answer(asked: Asked) -> tuple[int, object]:
        seen.append(asked)
        code = 200 if b'"encoding_format": "base64"' in asked.body else 400
        code = code if asked.headers.get("authorization") == "Bearer key" else 401
        return (code if len(asked.body) < 500 else 503), {}

    with playing(answer) as port:
        yield f"http://127.0.0.1:{port}/embeddings"


def test_an_openai_like_server_is_called_over_http() -> None:
    plan = steady(40, 0.5, classes=parse_classes(["short 50%: 100% 10", "long 50%: 100% 300"]))
    seen: list[Asked] = []
    with openai_server(seen) as url:
        records = run_load(Target(url, "openai", "model", headers=(("authorization", "Bearer key"),)), plan, ONE)
        short = steady(40, 0.1, classes=parse_classes(["short 100%: 100% 10"]))
        refused = run_load(Target(url, "openai", "model"), short, ONE)
    assert (set(refused.status), refused.said) == ({"HTTP 401"}, {"HTTP 401": "{}"})
    by_kind = {(kind, status) for kind, status in zip(records.kind, records.status, strict=True)}
    assert by_kind == {("short", "ok"), ("long", "HTTP 503")}
    assert not any("x-priority" in asked.headers for asked in seen)


def test_priorities_go_to_an_openai_like_door_in_its_header() -> None:
    plan = steady(60, 0.5, classes=parse_classes(["interactive 40%", "bulk/background 40%", "other 20%"]))
    seen: list[Asked] = []
    with openai_server(seen) as url:
        run_load(Target(url, "openai", "model"), plan, ONE)
    names = {0: "", 1: "interactive", 2: "background"}
    sent = sorted((json.loads(asked.body)["input"][0], asked.headers.get("x-priority", "")) for asked in seen)
    assert sent == sorted((request.text, names[request.priority]) for request in plan.requests)


def test_a_process_that_is_killed_ends_the_run_with_an_error() -> None:
    with null_server() as url, Crew(1) as crew:

        def kill(elapsed: float, done: object) -> None:
            if elapsed > 0.1:
                crew._processes[0].kill()

        with pytest.raises(EncoderError, match="ended before its time"):
            crew.run(Target(url), steady(50, 5), tell=kill)
        crew._processes[0].join()
        with pytest.raises(EncoderError, match="ended before its time"):
            crew.run(Target(url), steady(50, 5))


def test_ctrl_c_ends_the_processes_at_once_and_in_silence() -> None:
    # As from a terminal: to the whole group. The processes of the generator are starting by then.
    command = [sys.executable, "-m", "clients", "bench", "127.0.0.1:1", "--processes", "2", "--seconds", "60"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        started = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(started.read_text().split()) < 3:  # two of the load, one of multiprocessing's own
            time.sleep(0.005)
        time.sleep(0.2)
        os.killpg(running.pid, signal.SIGINT)
        shown = running.communicate(timeout=20)
    assert (running.returncode, shown) == (130, (b"", b""))


@pytest.mark.parametrize("load", [["--rate", "40", "--seconds", "60"], ["--clients", "2", "--seconds", "60"]])
def test_ctrl_c_in_the_load_keeps_what_was_measured_and_says_so(load: list[str], tmp_path: Path) -> None:
    with timed_server(delay=lambda at: 0.02) as server:
        options = [*load, "--processes", "2", "--late-limit", "5000", "--output", str(tmp_path)]
        command = [sys.executable, "-m", "clients", "bench", server.url, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            until(lambda: len(server.priorities) > 20, 30)
            running.send_signal(signal.SIGINT)
            shown = running.communicate(timeout=30)
    assert running.returncode == 130, shown
    assert "INTERRUPTED after" in shown[0]
    assert "Traceback" not in shown[1]
    rows = (tmp_path / "requests.jsonl").read_text().splitlines()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 20 <= len(rows) <= len(server.priorities)
    assert {json.loads(row)["status"] for row in rows} == {"ok"}
    assert summary["overall"]["requests"] == len(rows)
    assert 0 < summary["cut_s"] < 30
    assert ", interrupted" in (tmp_path / "report.html").read_text()


def test_a_second_ctrl_c_does_not_wait_for_the_processes() -> None:
    def interrupt(elapsed: float, done: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with timed_server() as server, pytest.raises(KeyboardInterrupt) as caught:
        run_load(Target(server.url), steady(50, 20), ONE, tell=interrupt)
    assert not isinstance(caught.value, Interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_crew_works_on_after_a_load_that_was_cut_short() -> None:
    once = iter([signal.SIGINT])

    def interrupt(elapsed: float, done: Progress) -> None:
        if done.done and (number := next(once, None)):
            signal.raise_signal(number)

    with timed_server() as server, Crew(2) as crew:
        with pytest.raises(Interrupted) as caught:
            crew.run(Target(server.url), steady(50, 20), tell=interrupt)
        assert 0 < len(caught.value.records) < 500
        assert caught.value.records.cut_s > 0
        assert len(crew.run(Target(server.url), steady(50, 0.2))) == 10


def test_a_process_that_fails_ends_the_run_with_its_reason() -> None:
    no_request = Plan((None,), 1.0, False)  # type: ignore[arg-type]
    with null_server() as url, pytest.raises(EncoderError, match=r"generator failed: .*AttributeError"):
        run_load(Target(url), no_request, ONE)


@pytest.mark.parametrize(("processes", "clients"), [(0, 0), (65, 0), (2, 1), (1, -1)])
def test_options_outside_their_limits_are_refused(processes: int, clients: int) -> None:
    with pytest.raises(InvalidInput):
        LoadOptions(processes, clients)


def test_an_empty_plan_and_an_address_of_the_other_protocol_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no request"):
        run_load(Target("127.0.0.1:1"), Plan((), 1.0, False), ONE)
    with pytest.raises(InvalidInput, match="does not fit"):
        Target("http://127.0.0.1:8000")
    with pytest.raises(InvalidInput, match="does not fit"):
        Target("127.0.0.1:8000", "openai")
