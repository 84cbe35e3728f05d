"""What a server says of itself, read from its replies, and the command that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clients import EncoderClient, ServerFailure, ServerUnavailable
from clients.cli import app
from clients.commands.status import host_of, status_table
from clients.model import read_facts
from clients.screen import width_of
from clients.status import fetch_metrics, read_status, samples
from tests.clients.fake_triton import FakeTriton
from tests.clients.ways import Way
from tests.tools.played import playing

PAGE = """# HELP nv_inference_pending_request_count Instantaneous number of pending requests
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="encode",version="1"} 12
nv_inference_request_failure{model="encode",reason="REJECTED",version="1"} 6
nv_inference_request_failure{model="encode",reason="OTHER",version="1"} 1
nv_inference_request_summary_us{model="encode",version="1",quantile="0.5"} 22000
nv_inference_request_summary_us{model="encode",version="1",quantile="0.99"} 115500
nv_inference_request_summary_us{model="encoder_128",version="1",quantile="0.99"} Nan
encoder_lanes_wakeups_total{model="encode",version="1"} 4
nv_gpu_utilization 0.5
"""


@pytest.fixture
def page() -> Iterator[str]:
    with playing(lambda asked: (200, PAGE)) as port:
        yield f"http://127.0.0.1:{port}/metrics"


def test_samples_have_name_labels_and_value() -> None:
    given = samples('a{x="1",y="a\\"b"} 2\n# a comment\nb 3.5\nNot Found\n')
    assert given == [("a", {"x": "1", "y": 'a\\"b'}, 2.0), ("b", {}, 3.5)]


def test_status_puts_index_statistics_and_metrics_together(server: FakeTriton, way: Way) -> None:
    with way.client(server) as client:
        status = client.status(metrics=PAGE)
    assert (status.version, status.metrics) == ("2.51.0", True)
    assert [(one.name, one.version, one.state) for one in status.models] == [
        ("encode", "1", "READY"), ("encoder_128", "1", "READY"), ("encoder_512", "2", "UNAVAILABLE"),
    ]  # fmt: skip
    entry, lane, absent = status.models
    assert (entry.requests, entry.texts, entry.batches, entry.mean_batch) == (30, 60, 20, 3.0)
    assert (entry.queue_ms, entry.compute_ms) == (3.0, 10.0)
    assert (entry.pending, entry.rejected, entry.failed) == (12, 2, 3)  # without the 4 wake-ups of the entry itself
    assert (entry.p50_ms, entry.p99_ms) == (22.0, 115.5)
    assert (lane.batch_sizes, lane.p99_ms, lane.failed) == ({3: 20}, None, 7)
    assert (absent.reason, absent.mean_batch, absent.queue_ms) == ("unloaded", None, None)


def test_loaded_models_are_shown_when_the_index_is_restricted(server: FakeTriton, way: Way) -> None:
    server.index = False
    with way.client(server) as client:
        status = client.status()
    assert [(one.name, one.state) for one in status.models] == [("encode", ""), ("encoder_128", "")]
    assert all(one.pending is None for one in status.models)


def test_each_version_is_spared_its_own_wake_ups_alone() -> None:
    """Two versions are loaded while one is on trial beside the other."""
    page = "".join(
        f'nv_inference_request_failure{{model="encode",reason="REJECTED",version="{version}"}} 9\n'
        f'encoder_lanes_wakeups_total{{model="encode",version="{version}"}} {woken}\n'
        f'nv_inference_pending_request_count{{model="encode",version="{version}"}} Nan\n'
        for version, woken in ((1, 5), (2, 3), (3, 1))
    )
    fails = [
        {"name": "encode", "version": str(version), "inference_stats": {"fail": {"count": 12}}} for version in (1, 2)
    ]
    models = read_status("h:1", {}, {"model_stats": fails}, None, page).models
    assert [(one.version, one.rejected, one.failed, one.pending) for one in models] == [
        ("1", 4, 7, None), ("2", 6, 9, None),
    ]  # fmt: skip


def test_status_of_no_server_is_an_error(way: Way) -> None:
    with way.client(way.at("127.0.0.1:1")) as client:
        assert not client.live()
        with pytest.raises(ServerUnavailable):
            client.status()


def test_table_has_a_row_a_model() -> None:
    index = {"models": [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "[red]\nno"}]}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_table(read_status("h:1", {"version": "2.51.0"}, {}, index, None)))
    assert "[red] no" in captured.get()
    assert "no metrics" in captured.get()


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("h:8001", "h"),
        ("http://h:8000/a", "h"),
        ("[::1]:8001", "[::1]"),
        ("unix:/a", "127.0.0.1"),
        ("h", "h"),
        ("dns:///h:8001", "h"),
        ("dns://1.1.1.1/h:8001", "h"),
        ("dns:h:8001", "h"),
        ("ipv4:10.0.0.1:8001,10.0.0.2:8001", "10.0.0.1"),
        ("ipv6:[::1]:8001", "[::1]"),
    ],
)
def test_host_of_a_url(url: str, host: str) -> None:
    assert host_of(url) == host


def test_command_prints_one_json_object(server: FakeTriton, page: str) -> None:
    done = CliRunner().invoke(app, ["status", "--url", server.url, "--metrics", page, "--json"])
    assert done.exit_code == 0, done.stderr
    given = json.loads(done.stdout)
    first = given["models"][0]
    assert (first["name"], first["mean_batch"], first["pending"]) == ("encode", 3.0, 12)


def test_command_prints_a_table(server: FakeTriton, page: str) -> None:
    done = CliRunner().invoke(
        app, ["status", "--url", server.http_url, "--metrics", page], env={"COLUMNS": "160", "TERM": "dumb"}
    )
    assert done.exit_code == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "encode " in line)
    assert row.split() == [
        "encode", "1", "READY", "30", "3", "2", "12", "3.0", "3.0", "10.0", "22.0", "115.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--metrics", "http://127.0.0.1:1/metrics"], 5),
        (["--metrics", "ftp://x"], 2),
        (["--watch", "0.01"], 2),
        (["--watch", "nan"], 2),
    ],
)
def test_command_says_what_is_wrong_in_one_line(server: FakeTriton, arguments: list[str], code: int) -> None:
    done = CliRunner().invoke(app, ["status", "--url", server.url, *arguments])
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)


def test_address_of_something_else_than_metrics_is_an_error(server: FakeTriton) -> None:
    for metrics in (f"http://{server.url}/metrics", f"{server.http_url}/v2"):
        done = CliRunner().invoke(app, ["status", "--url", server.url, "--metrics", metrics])
        assert (done.exit_code, done.stderr.count("\n")) == (5, 1)
        assert done.stderr.startswith("error: the metrics cannot be read: ")


def test_table_of_a_narrow_terminal_goes_without_a_few_columns(server: FakeTriton) -> None:
    with EncoderClient(server.url) as client:
        status = client.status(metrics=PAGE)
    del status.models[2]  # the one with a reason
    for model in status.models:
        model.requests = 1_234_567
        model.p99_ms = 1234.5
    assert width_of(status_table(status)) > 80
    shown = [str(column.header) for column in status_table(status, 80).columns]
    assert width_of(status_table(status, 80)) <= 80
    assert {"model", "version", "requests", "rejected", "pending", "P50\nms", "P99\nms"} <= set(shown)


def test_table_in_a_file_is_whole_however_narrow_the_terminal(server: FakeTriton, page: str) -> None:
    done = CliRunner().invoke(app, ["status", "--url", server.url, "--metrics", page], env={"COLUMNS": "40"})
    assert "encoder_512" in done.stdout
    assert "115.5" in done.stdout


def test_model_whose_configuration_is_another_is_a_server_failure() -> None:
    with pytest.raises(ServerFailure, match="configuration cannot be read"):
        read_facts({"output": [{"name": "EMBEDDING"}]}, "h:1")


def test_page_is_fetched(page: str) -> None:
    assert fetch_metrics(page) == PAGE
