"""Cores by group of processes between two readings, as the tables of a GPU visit show them."""

from __future__ import annotations

import shutil
import subprocess

from tests.measurements.h200.server import cpu_times, used_cores
from tests.measurements.h200.tables import markdown
from tests.tools.waiting import until


def test_cores_are_those_of_processes_that_stayed_and_of_those_that_began() -> None:
    before = {"entry": {(1, 10): 5.0, (2, 10): 7.0}, "lanes": {}}
    after = {"entry": {(1, 10): 9.0, (2, 10): 9.0, (3, 500): 2.0}, "lanes": {(4, 500): 0.5}}
    assert used_cores(before, after, 4.0) == {"entry": 2.0, "lanes": 0.12}


def test_cores_are_unknown_where_a_process_was_replaced_even_by_one_of_the_same_number() -> None:
    before = {"entry": {(1, 10): 5.0}, "lanes": {(2, 10): 1.0}}
    after = {"entry": {(1, 500): 0.5}, "lanes": {(2, 10): 3.0}}
    cores = used_cores(before, after, 4.0)
    assert cores == {"entry": None, "lanes": 0.5}
    found = {"throughput": 1.0, "p50": 1.0, "p99": 1.0, "cores": {"server": 0.0, **cores}}
    assert "| entry -, lanes 0.5 |" in markdown({"short_window-2": found})


def test_processes_are_found_by_what_they_run() -> None:
    sleep = shutil.which("sleep")
    assert sleep
    with subprocess.Popen(["tritonserver", "60"], executable=sleep) as process:  # noqa: S607
        try:
            # Right after its start a process has no command line for a moment.
            assert until(lambda: process.pid in {pid for pid, _ in cpu_times()["server"]})
            before = cpu_times()
        finally:
            process.kill()
            process.wait()
    assert used_cores(before, cpu_times(), 1.0)["server"] is None
