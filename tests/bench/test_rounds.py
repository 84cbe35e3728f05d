"""The order of measurements, and that whatever was started is stopped."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from builders.bench.driver import BenchError, Child, cpu_of, http_ready, terminable
from builders.bench.load import CLASSES, BenchLoad, LoadSpec, evenly, make_load
from builders.bench.peers import PeerDriver
from builders.bench.rounds import Measurement, gpu_share, measure, noise_of, run_rounds
from builders.settings import load_settings
from builders.source import open_source
from clients.errors import InvalidInput
from clients.load.metrics import Reading
from clients.load.plan import Segment, closed_plan, open_plan
from clients.load.run import Crew
from clients.load.texts import TextSource
from tests.bench.servers import FakeDriver
from tests.tools.repositories import ROOT

SOURCE = TextSource()


def load(rounds: int) -> BenchLoad:
    opened = open_plan(SOURCE, [Segment(40, 40, 0.4)], CLASSES, arrivals="constant")
    return BenchLoad((closed_plan(SOURCE, 5, 0.4),) * rounds, (opened,) * rounds, 2, 1, 0.0)


def test_servers_take_turns_and_each_round_begins_with_another_one() -> None:
    log: list[str] = []
    drivers = [FakeDriver("A", log=log), FakeDriver("B", seconds=0.05, log=log)]
    told: list[Measurement] = []
    measured, speeds = run_rounds(drivers, load(2), Console(file=io.StringIO()), flat={"B"}, record=told.append)
    assert told == measured
    assert [(one.driver, one.round, one.loop) for one in measured] == [
        (name, number, loop)
        for number, names in ((0, "AB"), (1, "BA"))
        for name in names
        for loop in ("closed", "open")
    ]
    assert log == ["start A", "start B", "stop B", "stop A"]
    assert len(speeds) == 4, "one before each turn"
    assert all(one.summary.overall.failed == 0 for one in measured)
    by_name = {(one.driver, one.loop): one.summary for one in measured}
    assert by_name["B", "open"].overall.p50 >= 50
    assert by_name["B", "closed"].throughput < by_name["A", "closed"].throughput
    # B was to get no priorities, but classes all the same.
    assert drivers[1].seen is not None
    assert set(drivers[1].seen.priorities) == {0}
    assert drivers[0].seen is not None
    assert {1, 2} <= set(drivers[0].seen.priorities)
    assert {group.name for group in by_name["B", "open"].classes} == {"interactive", "background"}


def test_a_server_that_is_started_for_its_turn_shows_its_first_requests() -> None:
    log: list[str] = []
    driver = FakeDriver("A", log=log)
    plan = open_plan(SOURCE, [Segment(40, 40, 0.1)], arrivals="constant")
    small = BenchLoad((closed_plan(SOURCE, 5, 0.3),), (plan,), 2, 1, 0.0)
    measured, _ = run_rounds([driver], small, Console(file=io.StringIO()), keep=False)
    assert [one.loop for one in measured] == ["first", "closed", "open"]
    assert measured[0].records.scheduled == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert log == ["start A", "stop A"]


def test_all_are_stopped_when_one_does_not_start() -> None:
    log: list[str] = []
    drivers = [FakeDriver("A", log=log), FakeDriver("B", log=log, broken=True)]
    with pytest.raises(BenchError, match="B: it does not start"):
        run_rounds(drivers, load(1), Console(file=io.StringIO()))
    assert log == ["start A", "start B", "stop B", "stop A"]


def test_two_servers_of_one_name_are_refused() -> None:
    with pytest.raises(BenchError, match="same name"):
        run_rounds([FakeDriver("A"), FakeDriver("A")], load(1), Console(file=io.StringIO()))


def test_load_that_cannot_be_sent_is_refused_before_servers_start() -> None:
    source = open_source(load_settings(ROOT / "deploy.cpu.yaml").model)
    with pytest.raises(InvalidInput, match=r"no request.*0.01 texts/s for 1 s"):
        make_load(LoadSpec(rate=0.01, open_s=1), source)
    with pytest.raises(InvalidInput, match="at least the 4 processes"):
        make_load(LoadSpec(clients=2, processes=4), source)


def test_server_that_does_half_as_many_texts_of_a_closed_loop_gets_them_as_long() -> None:
    drawn = closed_plan(SOURCE, 1000, 1.0, CLASSES, seed=4)
    spread = evenly(drawn, 4)
    assert sorted(map(id, spread.requests)) == sorted(map(id, drawn.requests))
    lengths = np.array([request.tokens for request in spread.requests])
    for done in range(200, 1000, 50):
        assert lengths[:done].mean() == pytest.approx(lengths.mean(), rel=0.03)
    assert evenly(drawn, 4) == spread != evenly(drawn, 5)
    neighbours = np.corrcoef(lengths[:-1], lengths[1:])[0, 1]
    assert abs(neighbours) < 0.15, "long texts are neither kept apart nor together"


def test_noise_is_said() -> None:
    driver = FakeDriver("A")
    target = driver.start()
    try:
        plan = open_plan(SOURCE, [Segment(40, 40, 0.2)], arrivals="constant")
        with Crew(1) as crew:
            one = measure(driver, target, plan, crew, Console(file=io.StringIO()), loop="open")
    finally:
        driver.stop()
    assert not [note for note in noise_of([one], [1000.0, 1010.0]) if "speed" in note]
    assert any("speed moved by 30 %" in note for note in noise_of([one], [1000.0, 1300.0]))
    sent = len(one.records)
    refused = replace(one, records=replace(one.records, status=["Overloaded", *["ok"] * (sent - 1)]))
    assert not [note for note in noise_of([one], []) if "failed" in note]
    assert [note for note in noise_of([refused], []) if f"A: 1 of {sent} requests failed" in note]
    for most, said in ((39.0, True), (1000.0, False)):
        full = replace(one, loop="closed", summary=replace(one.summary, throughput=most))
        assert any("past their maximum at the rate: A;" in note for note in noise_of([full, one], [])) == said


def test_gpu_utilisation_is_that_of_the_server_s_gpus_once_the_load_is_on() -> None:
    values = [{"a": 0.0, "b": 0.0}, {"a": 0.9, "b": 0.0}, {"a": 0.7, "b": 0.1}]
    readings = [Reading(2.0 * number, {"nv_gpu_utilization": value}) for number, value in enumerate(values)]
    assert gpu_share(readings, 1, after_s=2.0) == pytest.approx(0.8)
    assert gpu_share(readings, 2, after_s=2.0) == pytest.approx(0.425)
    assert gpu_share(readings, 1, after_s=60.0) == pytest.approx(1.6 / 3), "a load too short for anything better"
    assert gpu_share(readings, 0) is None
    assert gpu_share([], 1) is None


def test_cpu_time_is_that_of_the_whole_process_tree() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script, burn], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        found = cpu_of(process.pid)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert found.processes == 2
    assert 0.35 <= found.seconds < 5  # told in ticks of 10 ms
    assert cpu_of(None).seconds == 0.0


def test_a_server_that_ends_is_an_error_with_its_last_words() -> None:
    child = Child([sys.executable, "-c", "print('no model here'); raise SystemExit(3)"], lambda: False)
    with pytest.raises(BenchError, match=r"ended by itself \(exit code 3\).*no model here"):
        child.start()
    assert child.pid is None


def test_a_server_that_never_answers_is_stopped() -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"], lambda: False, start_s=0.3)
    with pytest.raises(BenchError, match="did not answer in time"):
        child.start()
    assert child.pid is None


def test_stopping_takes_the_whole_process_group(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = (
        "import pathlib, subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "pathlib.Path(sys.argv[1] + '.part').write_text(str(p.pid));"
        "pathlib.Path(sys.argv[1] + '.part').rename(sys.argv[1]); time.sleep(60)"
    )
    child = Child([sys.executable, "-c", script, str(mark)], mark.exists)
    child.start()
    grandchild = int(mark.read_text())
    child.stop()
    until = time.monotonic() + 5
    while _alive(grandchild) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(grandchild)


def test_server_s_output_is_kept_only_when_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    well = Child([sys.executable, "-c", "import time; time.sleep(60)"], lambda: True)
    well.start()
    well.stop()
    assert not list(tmp_path.iterdir())
    with pytest.raises(BenchError, match=str(tmp_path)):
        Child([sys.executable, "-c", "raise SystemExit(3)"], lambda: False).start()
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


def test_server_that_dies_later_says_how_and_its_log_stays_in_the_run_s_folder(tmp_path: Path) -> None:
    log, again = tmp_path / "run" / "mortal.log", "import time; print('all is well', flush=True); time.sleep(60)"
    child = Child([sys.executable, "-c", "print('no memory left'); raise SystemExit(3)"], lambda: True, log=log)
    assert child.ended() is None, "it has not started yet"
    child.start()
    said = _wait(child.ended)
    assert said == f"ended by itself (exit code 3); see {log}, which ends: no memory left"
    child.stop()
    assert child.ended() is None
    killed = Child([sys.executable, "-c", again], lambda: "well" in log.read_text(), log=log)
    killed.start()
    assert killed.ended() is None
    os.kill(killed.pid or 0, signal.SIGKILL)
    assert "killed by SIGKILL" in _wait(killed.ended)
    killed.stop()
    assert log.read_text() == "no memory left\nall is well\n"
    well = Child([sys.executable, "-c", again], lambda: True, log=log)
    well.start()
    well.stop()
    # Two messages named it: it stays, whatever comes after.
    assert log.read_text() == "no memory left\nall is well\n"
    log.unlink()
    well = Child([sys.executable, "-c", again], lambda: True, log=log)
    well.start()
    well.stop()
    assert not log.exists()


def _wait(ended: Callable[[], str | None]) -> str:
    until = time.monotonic() + 20
    while (said := ended()) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return said


#: A server in OpenAI's form that has enough after five answers.
_MORTAL = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    left = 5
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        Handler.left -= 1
        if Handler.left < 0:
            print("a tensor too many", flush=True)
            os._exit(7)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_peer_that_dies_under_load_is_named_with_its_last_words_and_the_others_are_measured_on(tmp_path: Path) -> None:
    mortal = PeerDriver("frail b4", "", [sys.executable, "-c", _MORTAL, "{port}"], "/health", logs=tmp_path)
    screen = io.StringIO()
    measured, _ = run_rounds([mortal, FakeDriver("well")], load(1), Console(file=screen, width=500))
    assert [(one.driver, one.loop, bool(one.ended)) for one in measured] == [
        ("frail b4", "closed", True),
        ("frail b4", "open", True),
        ("well", "closed", False),
        ("well", "open", False),
    ]
    log = tmp_path / "frail_b4.log"
    words = f"frail b4: ended by itself (exit code 7); see {log}, which ends: a tensor too many"
    assert [note for note in noise_of(measured, []) if "ended" in note] == [f"{words} (round 1, closed loop)"]
    assert words in screen.getvalue()
    assert log.read_text() == "a tensor too many\n"
    assert (measured[1].cpu_ms, measured[1].summary.overall.failed) == (0.0, len(measured[1].records))


def test_program_that_is_not_there_is_said() -> None:
    with pytest.raises(BenchError, match=r"no such program.*/nowhere/server"):
        Child(["/nowhere/server"], lambda: True).start()


_STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)


def test_second_ctrl_c_while_a_server_is_stopped_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = Child([sys.executable, "-c", _STUBBORN], lambda: any(path.read_text() for path in tmp_path.iterdir()))
    child.start()
    pid = child.pid
    assert pid is not None

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.stop()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not _alive(pid)


def test_bench_that_is_killed_outright_leaves_no_server() -> None:
    script = (
        "import os, signal, sys\n"
        "from builders.bench.driver import Child\n"
        "child = Child([sys.executable, '-c', 'import time; time.sleep(60)'], lambda: True)\n"
        "child.start()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    server = int(done.stdout)
    until = time.monotonic() + 5
    while _alive(server) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(server)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_program_end_the_block(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def killed() -> None:
        with terminable():
            os.kill(os.getpid(), number)
            time.sleep(1)

    with pytest.raises(SystemExit) as raised:
        killed()
    assert raised.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_address_where_nothing_listens_is_not_ready() -> None:
    assert not http_ready("http://127.0.0.1:1/health")
