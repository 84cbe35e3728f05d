"""Prometheus, with the files of deploy/, scrapes a real server under load and answers every query of the dashboard.

What a CPU cannot have, a GPU's and the door's metrics, comes from pages whose names are taken from the code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.operations.conftest import Watched
from tests.operations.prometheus import Prometheus
from tests.operations.test_dashboard import queries
from tests.tools.load import Call, open_loop
from tests.tools.waiting import until

#: Series that no CPU has, that only a door has, and that are there during a trial alone.
_ELSEWHERE = ("nv_gpu_", "encoder_lanes_engine_", "encoder_lanes:gpu", "door_", "encoder_lanes_candidate_seconds")


@pytest.fixture(scope="module", autouse=True)
def load(watched: Watched, prometheus: Prometheus) -> Iterator[None]:
    """Requests come, and Prometheus has seen them in both lanes."""
    stop = threading.Event()
    thread = threading.Thread(target=_load, args=(watched, stop))
    thread.start()
    try:
        text = f'rate(encoder_lanes_calls_total{{instance="{watched.target}"}}[1m]) > 0'
        assert until(lambda: len(prometheus.query(text)) == 2)
        yield
    finally:
        stop.set()
        thread.join()


def _load(watched: Watched, stop: threading.Event) -> None:
    """Ten requests a second, short and long, and one in five that the entry refuses."""
    url = f"127.0.0.1:{watched.server.ports.grpc}"
    while not stop.is_set():
        texts = ("How far is the moon?", "moon " * 50)
        calls = [
            Call((texts[number % 2],), {"priority": 1 + number % 2, "parameters": {"truncate": "end"}}, at=number / 10)
            for number in range(10)
        ]
        calls += [Call(("x",), {"parameters": {"truncate": "no"}}, at=number / 2) for number in range(2)]
        open_loop(url, calls)


def filled_in(text: str, instance: str) -> str:
    """A query as Grafana sends it."""
    return text.replace("$__rate_interval", "1m").replace("$instance", instance).replace("$model", ".*")


def test_every_query_of_the_dashboard_returns_data(watched: Watched, prometheus: Prometheus) -> None:
    waiting = {}
    for title, text in queries():
        # With the real server alone, wherever it is the source.
        elsewhere = any(name in text for name in _ELSEWHERE)
        waiting[title, text] = filled_in(text, ".*" if elsewhere else watched.target)

    def all_answered() -> bool:
        for key, query in list(waiting.items()):
            if prometheus.query(query):
                del waiting[key]
        return not waiting

    assert len(waiting) > 50
    until(all_answered, 25.0)
    assert waiting == {}


def test_figures_of_the_dashboard_agree_with_what_was_asked(watched: Watched, prometheus: Prometheus) -> None:
    server = f'instance="{watched.target}"'
    assert until(lambda: prometheus.query(f"encoder_lanes:p99_seconds{{{server}}}"))
    # Of twelve requests two are refused; Triton counts them among those that it answered. A rate itself needs a minute.
    share = f'encoder_lanes:refusals:rate1m{{{server}, kind="invalid"}} / ignoring (kind) encoder_lanes:answers:rate1m'
    assert until(lambda: 0.05 < prometheus.value(share) < 0.25)
    assert 0.005 < prometheus.value(f"encoder_lanes:p99_seconds{{{server}}}") < 60
    # Texts of 8 tokens in 32, beside a canary's and other tests' of at least 3, and of 52 in 64.
    assert 1 - 8 / 32 <= prometheus.value(f'encoder_lanes:padding:ratio5m{{{server}, bucket="32"}}') < 1 - 3 / 32
    assert prometheus.value(f'encoder_lanes:padding:ratio5m{{{server}, bucket="64"}}') == pytest.approx(1 - 52 / 64)
    assert prometheus.value(f"encoder_lanes:errors:ratio1m{{{server}}}") == 0


def test_wake_ups_are_no_rejects(watched: Watched, prometheus: Prometheus) -> None:
    server = f'instance="{watched.target}"'
    counted = f'sum(rate(nv_inference_request_failure{{reason="REJECTED", {server}}}[1m]))'
    assert until(lambda: prometheus.value(counted) > 0)
    assert prometheus.value(f"encoder_lanes:wakeups:rate1m{{{server}}}") > 0
    # The entry tells its wake-ups up to half a second after Triton has counted them.
    assert until(lambda: prometheus.value(f"encoder_lanes:rejects:ratio1m{{{server}}}") < 0.02, 40.0)


def test_prometheus_reads_what_the_launcher_knows_of_the_models(watched: Watched, prometheus: Prometheus) -> None:
    of = f'instance="{watched.supervisor}"'
    models = {"encode", "encoder_32", "encoder_64"}

    def ready() -> set[str]:
        return {one["metric"]["model"] for one in prometheus.query(f"encoder_lanes_supervisor_ready{{{of}}} == 1")}

    assert until(lambda: ready() == models)
    assert until(lambda: len(prometheus.query(f"encoder_lanes_supervisor_canary_seconds{{{of}}} > 0")) == len(models))
    assert prometheus.value(f"sum(encoder_lanes_supervisor_dead_processes{{{of}}})") == 0
    assert abs(prometheus.value(f"time() - encoder_lanes_launcher_start_time_seconds{{{of}}}")) < 3600
    # Above 1 after a test that had processes replaced.
    assert prometheus.value(f'encoder_lanes:warm:ratio{{instance="{watched.target}"}}') >= 1


def test_prometheus_evaluates_every_rule_without_an_error(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert until(lambda: all(rule["health"] == "ok" for rule in rules()))
    assert [rule["name"] for rule in rules() if rule.get("lastError")] == []
    assert len(rules()) > 40


def test_no_page_is_sent_for_a_healthy_server(watched: Watched, prometheus: Prometheus) -> None:
    time.sleep(1.0)
    alerts = [
        alert["labels"]["alertname"]
        for alert in prometheus.get("alerts")["alerts"]
        if alert["labels"].get("instance") in (watched.target, watched.supervisor) and alert["state"] == "firing"
    ]
    assert alerts == []
