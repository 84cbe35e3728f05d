"""The backlog's watch: thresholds with hysteresis, nothing while idle, no degrading without a number."""

from __future__ import annotations

import http.server
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from builders.serving.entry.backlog import HOLD_S, BacklogWatch, PendingCount, pending
from builders.serving.entry.config import DegradeConfig
from tests.tools.waiting import until

# A lost wake-up shows as a hang.
pytestmark = pytest.mark.timeout(60)

CONFIG = DegradeConfig(above=100, below=20, batch=4, metrics_url="http://127.0.0.1:1/metrics", interval_s=0.01)
PAGE = b"""# HELP nv_inference_pending_request_count Pending
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="encoder_128",version="1"} 3
nv_inference_pending_request_count{model="encode",version="2"} 5
nv_inference_pending_request_count{model="encode",version="1"} 17
nv_inference_pending_request_count_other{model="encode",version="7"} 9
"""


class Server:
    """A clock, and a queue whose length is set by hand."""

    def __init__(self) -> None:
        self.now, self.waiting = 50.0, 0.0
        self.reads = 0
        self.broken: Exception | None = None
        self.switches: list[tuple[bool, float]] = []
        self.errors: list[Exception] = []

    def read(self) -> float:
        self.reads += 1
        if self.broken:
            raise self.broken
        return self.waiting

    def watch(self, clock: Callable[[], float] | None = None) -> BacklogWatch:
        return BacklogWatch(
            self.read, CONFIG, lambda small, waiting: self.switches.append((small, waiting)), self.errors.append,
            clock or (lambda: self.now),
        )  # fmt: skip


def looks(watch: BacklogWatch, server: Server, waiting: float, seconds: float = 0.0) -> int | None:
    """What is so after looks every 100 ms for `seconds`, and at least one."""
    server.waiting = waiting
    watch.look()
    for _ in range(round(seconds / 0.1)):
        server.now += 0.1
        watch.look()
    return watch.batch


def test_batches_small_from_the_threshold_on() -> None:
    server = Server()
    watch = server.watch()
    assert looks(watch, server, 99, 5) is None
    assert looks(watch, server, 100) == 4
    assert server.switches == [(True, 100)]


def test_batches_stay_small_between_the_thresholds() -> None:
    server = Server()
    watch = server.watch()
    looks(watch, server, 150)
    assert looks(watch, server, 20, 10) == 4
    assert looks(watch, server, 150, 1) == 4
    assert server.switches == [(True, 150)]


def test_batches_normal_again_only_when_few_have_waited_for_the_hold_time() -> None:
    server = Server()
    watch = server.watch()
    looks(watch, server, 150)
    assert looks(watch, server, 19, HOLD_S - 0.2) == 4
    assert looks(watch, server, 20, 0.1) == 4
    assert looks(watch, server, 0, HOLD_S - 0.2) == 4, "the hold time begins anew"
    assert looks(watch, server, 0, 0.5) is None
    assert server.switches == [(True, 150), (False, 0)]


def test_every_rise_and_fall_switches_once() -> None:
    server = Server()
    watch = server.watch()
    for _ in range(3):
        looks(watch, server, 300, 2)
        looks(watch, server, 5, 2)
    assert [small for small, _ in server.switches] == [True, False] * 3


def test_batches_normal_and_one_error_told_when_the_number_cannot_be_read() -> None:
    server = Server()
    watch = server.watch()
    looks(watch, server, 500)
    server.broken = OSError("refused")
    assert looks(watch, server, 500, 3) is None
    assert server.errors == [server.broken]
    server.broken = None
    assert looks(watch, server, 500) == 4
    server.broken = OSError("again")
    looks(watch, server, 500, 1)
    assert len(server.errors) == 2


def test_nothing_read_before_the_first_batch_nor_long_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.serving.entry.backlog.BUSY_S", 0.1)
    server = Server()
    watch = server.watch(time.monotonic)
    watch.start()
    time.sleep(0.1)
    assert server.reads == 0
    watch.busy()
    assert until(lambda: server.reads >= 3)
    time.sleep(0.3)
    before = server.reads
    time.sleep(0.2)
    assert server.reads == before
    watch.busy()
    assert until(lambda: server.reads > before)
    watch.close()


def test_looks_go_on_until_batches_are_normal_when_the_entry_falls_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.serving.entry.backlog.BUSY_S", 0.0)
    server = Server()
    server.waiting = 200
    watch = server.watch(time.monotonic)
    watch.start()
    watch.busy()
    assert until(lambda: watch.batch == 4)
    server.waiting = 0
    assert until(lambda: watch.batch is None)
    watch.close()


def test_thread_ends_when_closed_before_its_start_while_idle_and_while_busy() -> None:
    before = set(threading.enumerate())
    for number in range(3):
        watch = Server().watch(time.monotonic)
        if number:
            watch.start()
        if number == 2:
            watch.busy()
        watch.close()
    assert set(threading.enumerate()) <= before


# Reading the number


def test_sample_of_the_model_and_version_found() -> None:
    assert pending(PAGE, (b'model="encode"', b'version="1"')) == 17
    assert pending(PAGE, (b'model="encode"', b'version="2"')) == 5
    for labels in ((b'model="encode"', b'version="7"'), (b'model="other"',)):
        with pytest.raises(LookupError, match="nv_inference_pending_request_count has no sample"):
            pending(PAGE, labels)


class Metrics(http.server.BaseHTTPRequestHandler):
    """Serves the page; every third answer ends its connection, as a proxy or a restart would."""

    protocol_version = "HTTP/1.1"
    connections = 0
    count = itertools.count(1)

    def setup(self) -> None:
        super().setup()
        Metrics.connections += 1

    def do_GET(self) -> None:
        status = 200 if self.path == "/metrics" else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(PAGE)))
        if next(Metrics.count) % 3 == 0:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_number_read_over_few_connections(url: str) -> None:
    read = PendingCount(f"{url}/metrics", "encode", 1)
    before = Metrics.connections
    assert [read() for _ in range(9)] == [17] * 9
    assert Metrics.connections - before <= 4
    read.close()


def test_error_when_it_is_no_page_of_metrics_or_nobody_answers(url: str) -> None:
    with pytest.raises(http.client.HTTPException, match="404"):
        PendingCount(f"{url}/other", "encode", 1)()
    with pytest.raises(LookupError):
        PendingCount(f"{url}/metrics", "nobody", 1)()
    with pytest.raises(OSError, match="refused"):
        PendingCount("http://127.0.0.1:1/metrics", "encode", 1)()
