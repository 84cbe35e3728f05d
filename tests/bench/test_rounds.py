"""The order of measurements, and that whatever was started is stopped."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from builders.bench.driver import BenchError, Child, cpu_of, http_ready
from builders.bench.load import CLASSES, BenchLoad
from builders.bench.rounds import measure, noise_of, run_rounds
from clients.load.plan import Segment, closed_plan, open_plan
from clients.load.run import Crew
from clients.load.texts import TextSource
from tests.bench.servers import FakeDriver

SOURCE = TextSource()


def load(rounds: int) -> BenchLoad:
    opened = open_plan(SOURCE, [Segment(40, 40, 0.4)], CLASSES, arrivals="constant")
    return BenchLoad((closed_plan(SOURCE, 5, 0.4),) * rounds, (opened,) * rounds, 2, 1, 0.0)


def test_servers_take_turns_and_each_round_begins_with_another_one() -> None:
    log: list[str] = []
    drivers = [FakeDriver("A", log=log), FakeDriver("B", seconds=0.05, log=log)]
    measured, speeds = run_rounds(drivers, load(2), Console(file=io.StringIO()), flat={"B"})
    assert [(one.driver, one.round, one.loop) for one in measured] == [
        (name, number, loop)
        for number, names in ((0, "AB"), (1, "BA"))
        for name in names
        for loop in ("closed", "open")
    ]
    assert log == ["start A", "start B", "stop B", "stop A"]
    assert len(speeds) == 2
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
    with pytest.raises(OSError, match="does not start"):
        run_rounds(drivers, load(1), Console(file=io.StringIO()))
    assert log == ["start A", "start B", "stop B", "stop A"]


def test_two_servers_of_one_name_are_refused() -> None:
    with pytest.raises(BenchError, match="same name"):
        run_rounds([FakeDriver("A"), FakeDriver("A")], load(1), Console(file=io.StringIO()))


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
    with pytest.raises(BenchError, match=r"ended with code 3.*no model here"):
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


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_address_where_nothing_listens_is_not_ready() -> None:
    assert not http_ready("http://127.0.0.1:1/health")
