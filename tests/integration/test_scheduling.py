"""What the service promises under load, each in seconds: one server with lanes of known service times.

Short batches take 20 ms, as on a GPU; long ones 120 ms, two texts each. One entry process. docs/reliability.md lists
the promises; tests/measurements/ has the same with real load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from builders.ports import free_ports
from builders.server import TritonServer
from clients.errors import Overloaded, QueueTimeout
from clients.failures import from_status
from tests.texts import mixed_texts
from tests.tools.load import Call, Sample, open_loop
from tests.tools.metrics import counter
from tests.tools.patience import patiently
from tests.tools.repositories import timed_repository

SHORT_S, LONG_S = 0.02, 0.12
#: Counts are told once a second.
SETTLED_S = 1.2
LONG_TEXT = " ".join(mixed_texts(40, seed=6))[:3000]
#: Texts of the long lane that one process holds.
BOUND = 16

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    ports = free_ports()
    entry = {
        "processes": 1,
        "batch": 16,
        "interactive": {"timeout_ms": 200, "queue_size": 400},
        "background": {"timeout_ms": 10_000, "queue_size": 350},
        # Without metrics_url: TritonServer tells its own, on whatever port it is.
        "degrade": {"enabled": True, "above": 250, "below": 100, "batch": 4},
    }
    folder = tmp_path_factory.mktemp("scheduling")
    lanes = {"long": {"bound": BOUND}}
    built = timed_repository(folder, SHORT_S, "deploy.long.cpu.yaml", long_s=LONG_S, entry=entry, lanes=lanes)
    with TritonServer(built.repository, built.models, ports=ports, log_path=folder / "server.log") as running:
        # The first calls of every bucket model and of the entry are slower.
        open_loop(running.grpc_url, [*shorts(16, priority=2), *longs(2, "interactive")])
        yield running


def shorts(number: int, at: float = 0.0, kind: str = "short", **options: int) -> list[Call]:
    return [Call((f"text {index}",), dict(options), at=at, kind=kind) for index in range(number)]


def longs(number: int, level: str, at: float = 0.0, **options: float) -> list[Call]:
    priority = {"interactive": 1, "background": 2}[level]
    asked = {"priority": priority, "parameters": {"class": level}, **options}
    return [Call((LONG_TEXT,), dict(asked), at=at, kind=level) for _ in range(number)]


def of(samples: list[Sample], kind: str) -> list[Sample]:
    return [sample for sample in samples if sample.call.kind == kind]


def is_timeout(sample: Sample) -> bool:
    return "Request timeout expired" in (sample.error or "")


def raised(server: TritonServer, sample: Sample) -> Exception:
    """What our client raises for it."""
    status, message = (sample.error or "").split(": ", 1)
    return from_status(status.removeprefix("StatusCode."), message, server.grpc_url)


class Rise:
    """How far counters of the entry have risen since `begin`."""

    COUNTED = (
        *(("refusals_total", "kind", kind) for kind in ("timeout", "overloaded", "cancelled")),
        *(("degrade_switches_total", "to", to) for to in ("small", "normal")),
    )

    def __init__(self, server: TritonServer):
        self._server = server
        self.begin()

    def begin(self) -> None:
        self._read_after = 0.0
        time.sleep(SETTLED_S)
        self._before = {counted: self._read(*counted) for counted in self.COUNTED}
        self._read_after = SETTLED_S

    def __call__(self, name: str, label: str, value: str) -> float:
        time.sleep(self._read_after)
        self._read_after = 0.0  # all counts of a test are asked for at its end
        return self._read(name, label, value) - self._before[name, label, value]

    def _read(self, name: str, label: str, value: str) -> float:
        return counter(self._server.metrics_url, f"encoder_lanes_{name}", **{label: value})


@pytest.fixture
def rise(server: TritonServer) -> Rise:
    return Rise(server)


# The long lane


@patiently
def test_interactive_long_text_overtakes_when_background_ones_wait(server: TritonServer) -> None:
    samples = open_loop(server.grpc_url, [*longs(8, "background"), *longs(2, "interactive", at=0.06)])
    assert [sample.error for sample in samples if sample.error] == []
    overtaken = sum(sample.latency > 0.06 + of(samples, "interactive")[1].latency for sample in samples[:8])
    # A group that runs, the entry's window, their own; background takes four groups.
    assert overtaken >= 4
    assert max(sample.latency for sample in of(samples, "background")) >= 4 * LONG_S


@patiently
def test_background_fills_half_of_the_long_lane_and_interactive_finds_room(server: TritonServer, rise: Rise) -> None:
    calls = [*longs(16, "background"), *longs(2, "interactive", at=0.08), Call(("short",), at=0.08, kind="short")]
    samples = open_loop(server.grpc_url, calls)
    refused = [sample for sample in of(samples, "background") if sample.error]
    # Half of the bound is 8; a group or two may have left before the last one came.
    assert 4 <= len(refused) <= 8
    assert all("UNAVAILABLE" in (sample.error or "") for sample in refused)
    assert all("limit: 8, half of lanes.long.bound" in (sample.error or "") for sample in refused)
    assert all(isinstance(raised(server, sample), Overloaded) for sample in refused)
    assert max(sample.latency for sample in refused) < 0.3, "refused at once"
    assert [sample.error for sample in samples[16:]] == [None] * 3
    assert rise("refusals_total", "kind", "overloaded") == len(refused)


@patiently
def test_long_text_refused_in_time_when_it_waits_longer_than_its_level(server: TritonServer, rise: Rise) -> None:
    samples = open_loop(server.grpc_url, longs(BOUND, "interactive"))
    expired, answered = [sample for sample in samples if sample.error], [s for s in samples if not s.error]
    # Two groups of two begin within 200 ms; a third may, by a hair, and on a busy machine only the first.
    assert 2 <= len(answered) <= 6
    assert all(is_timeout(sample) and "entry.interactive.timeout_ms" in (sample.error or "") for sample in expired)
    assert all("UNAVAILABLE" in (sample.error or "") for sample in expired)
    assert all(isinstance(raised(server, sample), QueueTimeout) for sample in expired)
    assert min(sample.latency for sample in expired) >= 0.2
    assert max(sample.latency for sample in expired) < 0.5
    assert rise("refusals_total", "kind", "timeout") == len(expired)


@patiently
def test_background_long_text_answered_when_interactive_ones_never_end(server: TritonServer) -> None:
    flood = [call for tick in range(80) for call in longs(1, "interactive", at=0.04 * tick)]
    samples = open_loop(server.grpc_url, [*flood, *longs(2, "background", at=0.5)])
    flooded, slow = of(samples, "interactive"), of(samples, "background")
    assert sum(is_timeout(sample) for sample in flooded) > 5, "interactive alone is more than the lane can do"
    assert [sample.error for sample in slow] == [None, None]
    # Every fifth group is theirs: 0.6 s and a little. The flood goes on for 2.7 s after they came.
    assert max(sample.latency for sample in slow) < 2.2


@patiently
def test_long_text_not_computed_when_its_client_gave_up_while_it_waited(server: TritonServer, rise: Rise) -> None:
    before = counter(server.metrics_url, "nv_inference_count", model="encoder_1024")
    # The first six take three groups: 360 ms.
    calls = [*longs(6, "background"), *longs(2, "background", at=0.05, client_timeout=0.1)]
    samples = open_loop(server.grpc_url, calls)
    assert [sample.error for sample in samples[:6] if sample.error] == []
    assert all("DEADLINE_EXCEEDED" in (sample.error or "") for sample in samples[6:])
    assert rise("refusals_total", "kind", "cancelled") == 2
    assert counter(server.metrics_url, "nv_inference_count", model="encoder_1024") - before == 6


# The entry's queue


def test_interactive_overtakes_a_backlog_when_the_load_is_more_than_the_server_can_do(server: TritonServer) -> None:
    calls = [*shorts(240, kind="backlog", priority=2)]
    calls += [call for tick in range(20) for call in shorts(1, at=0.02 + 0.02 * tick, kind="interactive", priority=1)]
    for _ in range(3):  # on a busy machine the client itself may stand still for as long
        samples = open_loop(server.grpc_url, calls)
        assert [sample.error for sample in of(samples, "backlog") if sample.error] == []
        fast, slow = (
            float(np.median([s.latency for s in of(samples, kind) if not s.error]))
            for kind in ("interactive", "backlog")
        )
        if fast < 0.5 * slow:
            return
    pytest.fail(f"median: interactive {fast:.3f} s, backlog {slow:.3f} s")


def test_reject_arrives_soon_after_the_200_ms(server: TritonServer) -> None:
    # Some 20 requests of four texts are served within 200 ms. P95 <= 300 ms and 700 ms at most is the promise at
    # GPU-like service times (tests/measurements/lanes.py has it under real load); a busy machine gets more rounds.
    for _ in range(3):
        calls = [Call(tuple(f"text {n}" for n in range(4)), {"priority": 1}) for _ in range(70)]
        rejected = [sample for sample in open_loop(server.grpc_url, calls) if sample.error]
        assert len(rejected) > 20
        assert all(is_timeout(sample) for sample in rejected)
        latency = [sample.latency for sample in rejected]
        assert min(latency) >= 0.19
        if np.percentile(latency, 95) <= 0.3 and max(latency) <= 0.7:
            return
    pytest.fail(f"P95 {np.percentile(latency, 95):.3f} s, longest {max(latency):.3f} s")


@patiently
def test_request_refused_at_once_when_the_queue_of_its_level_is_full(server: TritonServer, rise: Rise) -> None:
    samples = open_loop(server.grpc_url, [*shorts(500, priority=2), *shorts(1, at=0.05, kind="now", priority=1)])
    refused = [sample for sample in of(samples, "short") if sample.error]
    assert 40 <= len(refused) <= 150
    assert all("UNAVAILABLE" in (sample.error or "") for sample in refused)
    assert all(isinstance(raised(server, sample), Overloaded) for sample in refused)
    assert "maximum queue size" not in (samples[-1].error or ""), "the other level has a queue of its own"
    assert rise("refusals_total", "kind", "overloaded") == 0, "Triton refuses them, not the entry"


def test_batches_small_under_backlog_and_normal_after_it_with_every_answer_right(
    server: TritonServer, rise: Rise
) -> None:
    alone = open_loop(server.grpc_url, shorts(16, priority=2))
    samples = open_loop(server.grpc_url, shorts(340, priority=2))
    assert [sample.error for sample in samples if sample.error] == []
    right = {sample.call.texts[0]: sample.vectors for sample in alone}
    for sample in samples:
        if sample.call.texts[0] in right:
            assert np.array_equal(sample.vectors, right[sample.call.texts[0]])
    time.sleep(1.2)
    assert rise("degrade_switches_total", "to", "small") >= 1
    assert rise("degrade_switches_total", "to", "small") == rise("degrade_switches_total", "to", "normal")
    assert counter(server.metrics_url, "encoder_lanes_degraded") == 0
