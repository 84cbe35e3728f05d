"""deploy/grafana/ask.py: the dashboard's queries without Grafana. That Prometheus answers them: test_guide.py."""

from __future__ import annotations

import subprocess
import sys

from builders.ports import free_ports
from tests.operations.test_dashboard import GRAFANA, queries

sys.path.insert(0, str(GRAFANA))
ask = __import__("ask")


def test_every_query_of_the_dashboard_is_asked_with_its_variables_filled_in() -> None:
    asked = list(ask.queries())
    assert [title for title, _ in asked] == [title for title, _ in queries()]
    assert not any("$" in text for _, text in asked)


def test_it_says_so_and_fails_when_no_prometheus_answers() -> None:
    command = [sys.executable, str(GRAFANA / "ask.py"), f"http://127.0.0.1:{free_ports().http}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    assert "does not answer as Prometheus does" in run.stderr
