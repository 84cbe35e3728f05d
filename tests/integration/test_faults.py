"""Faults on the real server: each request gets one answer or one clear error, and the service heals by itself."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from builders.access import Access
from builders.canary import CanarySettings
from builders.health import health_endpoint
from builders.ports import free_ports
from builders.server import TritonServer
from builders.supervisor import Supervisor, SupervisorSettings
from builders.triton_log import ServerEvent
from tests.tools.load import Call, Sample, open_loop, text_input
from tests.tools.repositories import timed_repository
from tests.tools.waiting import until

psutil = pytest.importorskip("psutil")

KEY = ("control", "secret")
#: What a request may get instead of an answer, whatever happens to the server's processes.
CLEAR = re.compile(
    r"StatusCode\.INTERNAL: Stub process '\w+' is not healthy\."
    r"|StatusCode\.UNAVAILABLE: encoder_\w+: Stub process '\w+' is not healthy\."
    r"|StatusCode\.UNAVAILABLE: (.*timeout expired|.*maximum queue size.*|the long lane holds .*|.*waited longer.*)",
    re.I | re.S,
)
SHORT_S, LONG_S = 0.02, 0.5
#: More tokens than the short bucket holds.
LONG = "a long text of many words " * 6
FAST = SupervisorSettings(
    look_s=0.1, canary=CanarySettings(every_s=0.3, deadline_s=3.0), loop_heals=3, loop_s=30.0, backoff_s=2.0, idle_s=2.0
)
# A lane that waits while one file is there, and hangs for good when it finds another; and an entry whose wall clock can
# jump.
HANG = """    def execute(self, requests):
        import os
        while os.path.exists({jam!r}):
            time.sleep(0.01)
        if os.path.exists({hang!r}):
            os.unlink({hang!r})
            time.sleep(3600)
"""
JUMP = """import os as _os
import time as _time

_wall = _time.time
_time.time = lambda: _wall() + (float(open({jump!r}).read() or 0) if _os.path.exists({jump!r}) else 0.0)
"""


@dataclass
class Site:
    """A server with two entry processes and two lanes, and the files that disturb it."""

    server: TritonServer
    folder: Path

    @property
    def repository(self) -> Path:
        return self.server.repository

    def pids(self, model: str) -> list[int]:
        """Living processes of a model, oldest first."""
        assert self.server.pid is not None
        found = []
        for child in psutil.Process(self.server.pid).children():
            if child.status() != psutil.STATUS_ZOMBIE and f"/{model}/" in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid))
        return [pid for _, pid in sorted(found)]

    def executions(self, model: str) -> int:
        """Batches that a model computed since its load."""
        status, answer = self.server.http.ask("GET", f"/v2/models/{model}/stats")
        assert status == 200
        return sum(int(version["execution_count"]) for version in answer["model_stats"])

    def texts(self, model: str) -> int:
        """Texts that a model computed since its load."""
        status, answer = self.server.http.ask("GET", f"/v2/models/{model}/stats")
        assert status == 200
        return sum(int(version["inference_count"]) for version in answer["model_stats"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One server for all faults that it survives."""
    folder = tmp_path_factory.mktemp("faults")
    level = {"timeout_ms": 20_000, "queue_size": 5_000}
    built = timed_repository(
        folder,
        SHORT_S,
        buckets=[16, 64],
        model={"max_tokens": 64},
        lanes={
            "short": {"up_to": 16, "batch": 8, "late_from": None},
            "long": {"above": 16, "batch": 4, "nice": 0, "bound": 16},
        },
        entry={"processes": 2, "batch": 8, "interactive": level, "background": level},
    )
    lane = built.repository / "encoder_64" / "1" / "model.py"
    lane.write_text(lane.read_text().replace(f"SERVICE_S = {SHORT_S}", f"SERVICE_S = {LONG_S}"))
    lane = built.repository / "encoder_16" / "1" / "model.py"
    hang = HANG.format(hang=str(folder / "hang"), jam=str(folder / "jam"))
    lane.write_text(lane.read_text().replace("    def execute(self, requests):\n", hang))
    entry = built.repository / "encode" / "1" / "model.py"
    head, marker, rest = entry.read_text().partition("from __future__ import annotations\n")
    entry.write_text(head + marker + JUMP.format(jump=str(folder / "jump")) + rest)
    with TritonServer(
        built.repository,
        built.models,
        ports=free_ports(),
        log_path=folder / "server.log",
        access=Access(KEY),
        drain_models=["encode"],
        exit_timeout_s=10,
        watch=False,
    ) as server:
        open_loop(server.grpc_url, [Call(("warm",)) for _ in range(16)])
        yield Site(server, folder)


@dataclass
class Watched:
    """A supervisor over the site, its health endpoint and what it told."""

    supervisor: Supervisor
    url: str
    events: list[ServerEvent] = field(default_factory=list)

    def told(self, kind: str, words: str = "") -> bool:
        return any(event.kind == kind and words in event.text for event in self.events)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz") as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return error.code != 503


@contextmanager
def watched(site: Site, settings: SupervisorSettings = FAST) -> Iterator[Watched]:
    events: list[ServerEvent] = []

    def held() -> None:
        site.server.held_by_healed = True

    supervisor = Supervisor(
        site.repository,
        site.server.models,
        site.server.http,
        lambda: site.server.pid if site.server.is_running else None,
        settings,
        events.append,
        held,
    )
    with health_endpoint("127.0.0.1", 0, supervisor.status) as url:
        supervisor.start()
        try:
            found = Watched(supervisor, url, events)
            assert until(found.ready)
            time.sleep(3 * settings.look_s)
            yield found
        finally:
            supervisor.close()


@contextmanager
def steady(site: Site, rate: float, seconds: float, text: str = "short {}") -> Iterator[list[Sample]]:
    """Open-loop traffic beside the block; the samples are there at its end, one per request."""
    calls = [Call((text.format(number),), at=number / rate) for number in range(int(rate * seconds))]
    samples: list[Sample] = []
    thread = threading.Thread(target=lambda: samples.extend(open_loop(site.server.grpc_url, calls)))
    thread.start()
    try:
        yield samples
    finally:
        thread.join()
    assert len(samples) == len(calls)


def check_clear(samples: list[Sample]) -> list[Sample]:
    """Each sample is an answer or a clear error; returns the errors."""
    errors = [sample for sample in samples if sample.error is not None]
    for sample in errors:
        assert CLEAR.fullmatch(sample.error or ""), sample.error
    for sample in samples:
        assert sample.error is not None or (sample.vectors is not None and sample.vectors.shape[0] == 1)
    return errors


@pytest.mark.parametrize("model", ["encode", "encoder_16"])
def test_requests_get_one_answer_or_one_clear_error_and_the_model_heals_when_its_process_is_killed_under_load(
    site: Site, model: str
) -> None:
    with watched(site) as watch:
        with steady(site, rate=60, seconds=5) as samples:
            time.sleep(1.0)
            os.kill(site.pids(model)[0], signal.SIGKILL)
            assert until(lambda: watch.told("error", "died"))
            assert not watch.ready()
            assert until(lambda: watch.told("healed", "new processes"))
        assert until(watch.ready)
        errors = check_clear(samples)
        took = watch.events[-1].seconds - watch.events[0].seconds
        print(f"{model}: {len(errors)} of {len(samples)} failed, healed {took:.1f} s after its death was seen")
        # One entry process of two, or the only process of a lane, for at most some seconds.
        assert 0 < len(errors) < len(samples) / 2
        after = open_loop(site.server.grpc_url, [Call((f"after {n}",)) for n in range(40)])
        assert all(sample.error is None for sample in after)
        # The dead one's neighbours of before the heal are gone too, however they had to go.
        assert until(lambda: len(site.pids(model)) == (2 if model == "encode" else 1))
        time.sleep(1.5)
        assert watch.ready()
        assert sum(event.kind == "healed" and "new processes" in event.text for event in watch.events) == 1


def test_hung_lane_is_found_and_replaced_when_nothing_of_it_is_answered(site: Site) -> None:
    with watched(site) as watch:
        (site.folder / "hang").touch()
        (sample,) = open_loop(site.server.grpc_url, [Call(("caught in the hang",))])
        check_clear([sample])
        assert until(lambda: watch.told("error", "it hangs"))
        # The lane alone, not the entry that waits for it.
        assert {event.model for event in watch.events if "it hangs" in event.text} == {"encoder_16"}
        assert until(lambda: watch.told("healed", "new processes"))
        assert until(watch.ready)
        assert open_loop(site.server.grpc_url, [Call(("after",))])[0].error is None


@pytest.mark.slow
def test_crash_loop_is_told_and_not_ready_when_a_model_dies_again_and_again(site: Site) -> None:
    with watched(site) as watch:
        for number in range(1, FAST.loop_heals + 1):
            os.kill(site.pids("encoder_64")[0], signal.SIGKILL)
            assert until(lambda: sum(e.kind == "healed" and "new" in e.text for e in watch.events) == number)  # noqa: B023
            time.sleep(0.5)
        assert watch.told("error", "it died 3 times")
        assert not watch.ready()
        (status,) = [model for model in watch.supervisor.status().models if model.model == "encoder_64"]
        assert (status.crash_loop, status.heals) == (True, 3)
        # It answers all the same: the service is worse, not gone.
        assert open_loop(site.server.grpc_url, [Call((LONG,))])[0].error is None


@pytest.mark.slow
def test_not_healed_and_said_so_when_the_new_processes_cannot_start(site: Site) -> None:
    code = site.repository / "encoder_64" / "1" / "model.py"
    good = code.read_text()
    with watched(site) as watch:
        try:
            code.write_text("raise RuntimeError('the disk was eaten')")
            os.kill(site.pids("encoder_64")[0], signal.SIGKILL)
            assert until(lambda: watch.told("failed", "the disk was eaten"))
            assert not watch.ready()
            # Short texts know nothing of it.
            assert open_loop(site.server.grpc_url, [Call(("short",))])[0].error is None
        finally:
            code.write_text(good)
        assert until(lambda: watch.told("healed", "new processes"))
        assert open_loop(site.server.grpc_url, [Call((LONG,))])[0].error is None


def test_short_texts_are_not_held_up_and_long_ones_time_out_as_promised_when_the_long_lane_is_slow(site: Site) -> None:
    # 8 texts a second is all that the long lane does; 60 come at once, 16 are held by each process.
    long_calls = [Call((LONG + str(n),), {"timeout": 20_000_000}, at=0.0, kind="long") for n in range(60)]
    short_calls = [Call((f"s {n}",), {"priority": 1}, at=0.3 + n / 20, kind="short") for n in range(40)]
    samples = open_loop(site.server.grpc_url, [*long_calls, *short_calls])
    refused = check_clear(samples)
    short = sorted(sample.latency for sample in samples if sample.call.kind == "short" and sample.error is None)
    assert len(short) == 40
    assert short[-1] < 3 * LONG_S
    assert short[20] < 0.25
    assert {sample.call.kind for sample in refused} <= {"long"}
    answered = [sample for sample in samples if sample.call.kind == "long" and sample.error is None]
    assert len(answered) >= 8
    assert all(sample.latency < 10 for sample in refused)


@pytest.mark.slow
def test_nothing_changes_when_the_wall_clock_jumps(site: Site) -> None:
    """The entry's Python sees an hour more, then a day less; queue, wake-up and timeouts go by another clock."""
    jump = site.folder / "jump"
    try:
        with steady(site, rate=40, seconds=3) as samples:
            for seconds in ("3600", "-86400"):
                time.sleep(1.0)
                jump.write_text(seconds)
        assert all(sample.error is None for sample in samples)
        assert max(sample.latency for sample in samples) < 2.0
        began = time.monotonic()
        hopeless = [Call((LONG + str(n),), {"priority": 1, "timeout": 300_000}) for n in range(40)]
        refused = check_clear(open_loop(site.server.grpc_url, hopeless))
        assert refused
        assert time.monotonic() - began < 10
    finally:
        jump.unlink(missing_ok=True)


def test_descriptors_come_back_when_ten_thousand_connections_are_opened_and_closed(site: Site) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{site.server.pid}/fd"))

    before = descriptors()
    for port in (site.server.ports.http, site.server.ports.grpc):
        held: list[socket.socket] = []
        for number in range(5_000):
            connection = socket.create_connection(("127.0.0.1", port))
            if number % 2:
                # Half of them say something that is no request, half nothing.
                connection.sendall(b"\x00\xffnonsense\r\n\r\n")
            held.append(connection)
            if len(held) == 100:
                for each in held:
                    each.close()
                held.clear()
        (sample,) = open_loop(site.server.grpc_url, [Call(("still there?",))])
        assert sample.error is None
    assert until(lambda: descriptors() <= before + 5, 20), (before, descriptors())


def test_a_body_that_is_far_too_large_is_refused_and_nobody_else_touched(site: Site) -> None:
    # Triton 2.51 has no limit of its own: it reads the body whole, and the entry refuses the text.
    text = "x" * (48 << 20)
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
    with steady(site, rate=20, seconds=3) as samples:
        time.sleep(0.3)
        status, answer = site.server.http.ask("POST", "/v2/models/encode/infer", body, timeout_s=60)
        assert (status, "entry.max_text_bytes" in answer["error"]) == (400, True)
        (sample,) = open_loop(site.server.grpc_url, [Call((text,))])
        assert "INVALID_ARGUMENT" in (sample.error or "")
        assert "entry.max_text_bytes" in (sample.error or "")
    assert all(sample.error is None for sample in samples)


# ── clients that give up ─────────────────────────────────────────────────────────────────────────────────────────────


#: Requests of clients that give up; and the most of them that may be computed all the same: what the two entry
#: processes, with batches of 8, have sent to the lane by then.
SENT, IN_HAND = 400, 2 * 8


def texts_computed(site: Site, give_up: Callable[[], None]) -> int:
    """Texts that the short lane computes of what `give_up` sends and gives up while nothing is answered."""
    before, jam = site.texts("encoder_16"), site.folder / "jam"
    jam.touch()
    try:
        give_up()
    finally:
        jam.unlink()
    assert open_loop(site.server.grpc_url, [Call(("behind it",))])[0].error is None
    time.sleep(0.5)
    return site.texts("encoder_16") - before - 1


def test_nothing_but_what_is_in_hand_is_computed_when_grpc_calls_are_cancelled(site: Site) -> None:
    def cancelled() -> None:
        with grpc.InferenceServerClient(site.server.grpc_url) as client:
            texts = [text_input([f"c {number}"]) for number in range(SENT)]
            calls = [client.async_infer("encode", [text], lambda result, error: None) for text in texts]
            time.sleep(0.5)
            for call in calls:
                call.cancel()
            time.sleep(0.5)

    computed = texts_computed(site, cancelled)
    print(f"{computed} of {SENT} cancelled calls were computed")
    assert 0 < computed <= IN_HAND


def test_nothing_but_what_is_in_hand_is_computed_when_the_clients_deadline_passes(site: Site) -> None:
    errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def expired() -> None:
        with grpc.InferenceServerClient(site.server.grpc_url) as client:
            for n in range(SENT):
                tensor = text_input([f"d {n}"])
                client.async_infer("encode", [tensor], lambda result, error: errors.put(error), client_timeout=0.5)
            assert all("Deadline Exceeded" in str(errors.get(timeout=10)) for _ in range(SENT))
            time.sleep(0.5)

    computed = texts_computed(site, expired)
    print(f"{computed} of {SENT} calls past their deadline were computed")
    assert 0 < computed <= IN_HAND


def http_and_close(site: Site, parameters: dict[str, object]) -> Callable[[], None]:
    def closed() -> None:
        tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["h"]}
        text = json.dumps({"parameters": parameters, "inputs": [tensor]})
        head = f"POST /v2/models/encode/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
        connections = []
        for _ in range(SENT):
            connection = socket.create_connection(("127.0.0.1", site.server.ports.http))
            connection.sendall((head + text).encode())
            connections.append(connection)
        for connection in connections:
            connection.close()
        time.sleep(0.5)

    return closed


@pytest.mark.slow
def test_the_timeout_alone_bounds_what_is_computed_when_an_http_client_closes_its_connection(site: Site) -> None:
    # Triton 2.51 does not notice that an HTTP client has gone: without a timeout all is computed. This shows it, so
    # that a Triton that does notice makes the README's sentence be changed.
    assert texts_computed(site, http_and_close(site, {})) == SENT
    computed = texts_computed(site, http_and_close(site, {"timeout": 150_000}))
    print(f"{computed} of {SENT} HTTP calls with a timeout of 150 ms were computed")
    assert 0 < computed <= IN_HAND
