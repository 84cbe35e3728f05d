"""The load of a soak: every request of every turn, at its time, told while it goes on."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clients.errors import EncoderError
from clients.load.plan import Segment, open_plan, parse_classes
from clients.load.target import Target
from clients.load.texts import TextSource
from tests.load.servers import timed_server
from tests.tools.steady_load import SteadyLoad

TRACE = open_plan(TextSource(), [Segment(60, 60, 1.0)], parse_classes(["interactive 50%", "background 50%"]), seed=3)


def test_each_turn_of_the_trace_is_sent_and_told_while_the_load_goes_on() -> None:
    with timed_server() as server, SteadyLoad(Target(server.url), TRACE, turns=2) as load:
        first = load.until(1.5)
        assert time.monotonic() - load.start == pytest.approx(1.5, abs=0.3)
        rest = load.rest()
        assert load.until(0.0).scheduled == []
    assert len(TRACE.requests) < len(first) < 2 * len(TRACE.requests)
    assert max(first.scheduled) < 1.5
    due = [request.at + turn for turn in range(2) for request in TRACE.requests]
    assert np.allclose(sorted(first.scheduled + rest.scheduled), due)
    assert (first.ok().all(), rest.ok().all()) == (True, True)
    assert sorted(first.kind + rest.kind) == sorted(2 * [request.kind for request in TRACE.requests])
    # One after the other they come at the gaps of the trace; the generator's own delay is told.
    assert np.median(first.lateness_ms()) < 50


def test_its_end_before_its_time_is_an_error() -> None:
    with timed_server() as server, SteadyLoad(Target(server.url), TRACE, turns=5) as load:
        load.until(0.5)
        load._process.kill()
        with pytest.raises(EncoderError, match="ended before its time"):
            load.rest()
