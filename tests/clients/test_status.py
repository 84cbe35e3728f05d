"""What a server says of itself, read from its replies, and the command that shows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clients import ServerUnavailable
from clients.cli import app
from clients.commands.status import host_of, status_table
from clients.status import fetch_metrics, read_status, samples
from tests.clients.fake_triton import FakeTriton
from tests.clients.ways import Way

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
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def test_samples_have_name_labels_and_value() -> None:
    given = samples('a{x="1",y="a\\"b"} 2\n# a comment\nb 3.5\n')
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
    [("h:8001", "h"), ("http://h:8000/a", "h"), ("[::1]:8001", "[::1]"), ("unix:/a", "127.0.0.1"), ("h", "h")],
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
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "encode", "1", "READY", "30", "3", "2", "12", "3.0", "3.0", "10.0", "22.0", "115.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--metrics", "http://127.0.0.1:1/metrics"], 5), (["--metrics", "ftp://x"], 2), (["--watch", "0.01"], 2)],
)
def test_command_says_what_is_wrong_in_one_line(server: FakeTriton, arguments: list[str], code: int) -> None:
    done = CliRunner().invoke(app, ["status", "--url", server.url, *arguments])
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)


def test_page_is_fetched(page: str) -> None:
    assert fetch_metrics(page) == PAGE
