"""The first calls of an entry process, on a server that is given by functions."""

from __future__ import annotations

import threading

from builders.serving.entry.config import BucketRoute
from builders.serving.entry.warmup import ROUNDS, FirstCalls

ROUTES = (BucketRoute(32, "encoder_32", 4, "together"), BucketRoute(64, "encoder_64", 2, "late"))


class Server:
    """Refuses the first `refusals` calls as Triton does during its start; some lanes may be absent."""

    def __init__(self, refusals: int = 0, absent: tuple[str, ...] = ()) -> None:
        self.refusals, self.absent = refusals, absent
        self.refused = threading.Event()
        self.called: list[str] = []
        self.told: list[str] = []
        self.done = threading.Event()
        self.times_done = 0

    def call(self, route: BucketRoute) -> None:
        if self.refusals:
            self.refusals -= 1
            self.refused.set()
            raise RuntimeError(f"{route.model}: Server not ready")
        if route.model in self.absent:
            raise RuntimeError(f"Request for unknown model: '{route.model}' is not found")
        self.called.append(route.model)

    def end(self) -> None:
        self.times_done += 1
        self.done.set()

    def calls(self) -> FirstCalls:
        return FirstCalls(ROUTES, self.call, self.end, self.told.append)


def test_every_lane_is_called_and_the_process_is_warm_after_it() -> None:
    server = Server(refusals=3)
    calls = server.calls()
    calls.start()
    assert server.done.wait(10)
    assert server.called[0] == "encoder_32", "the first call finds out whether calls are taken"
    assert sorted(server.called[1:]) == ["encoder_32"] * ROUNDS + ["encoder_64"] * ROUNDS
    assert not server.told
    calls.close()
    assert server.times_done == 1


def test_nothing_is_called_before_the_first_request_was_executed() -> None:
    server = Server()
    calls = server.calls()
    assert not server.done.wait(0.3), "a call while the server still makes the instance would end it"
    calls.close()
    assert (server.called, server.times_done) == ([], 0)


def test_calls_are_made_once_however_many_requests_come() -> None:
    server = Server()
    calls = server.calls()
    for _ in range(5):
        calls.start()
    assert server.done.wait(10)
    calls.close()
    assert (len(server.called), server.times_done) == (1 + ROUNDS * len(ROUTES), 1)


def test_lane_that_is_not_there_does_not_keep_the_process_cold() -> None:
    server = Server(absent=("encoder_32",))
    server.calls().start()
    assert server.done.wait(10)
    assert set(server.called) == {"encoder_64"}
    assert all("encoder_32 failed: Request for unknown model" in line for line in server.told)


def test_server_that_never_starts_does_not_keep_a_model_from_unloading() -> None:
    server = Server(refusals=10**9)
    calls = server.calls()
    calls.start()
    assert server.refused.wait(10)
    calls.close()
    assert (server.called, server.times_done) == ([], 0)
