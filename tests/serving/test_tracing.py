"""The entry's own spans: whose they are, that nothing waits for the collector, and what is lost without it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from builders.serving.entry.tracing import Parent, Tracer, open_tracer, read_parent
from tests.operations.collector import Collector, collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = Parent(TRACE, SPAN)


@pytest.fixture
def receiver() -> Iterator[Collector]:
    with collector() as found:
        yield found


def test_the_place_in_a_trace_is_read_from_tritons_context() -> None:
    assert read_parent(json.dumps({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"})) == PARENT


@pytest.mark.parametrize(
    "context",
    [None, "", "{}", "[]", "no JSON", '{"traceparent": 7}', f'{{"traceparent": "00-{TRACE}-{SPAN[:-1]}-01"}}'],
)
def test_a_context_that_is_none_or_cannot_be_read_is_no_trace(context: str | None) -> None:
    assert read_parent(context) is None


def test_each_traced_request_gets_one_span_and_the_others_none(receiver: Collector) -> None:
    tracer = Tracer(receiver.url, "mine", pytest.fail, interval_s=0.01)
    other = Parent("f" * 32, "e" * 16)
    tracer.add("call", [PARENT, None, PARENT, other], 10, 30, {"texts": 3, "lane": "short"}, calls=True)
    tracer.add("call", [None], 10, 30)
    tracer.close()
    spans = receiver.spans()
    assert {(span.trace, span.parent) for span in spans} == {(TRACE, SPAN), (other.trace, other.span)}
    assert len(spans) == len({span.own for span in spans}) == 2
    assert (spans[0].name, spans[0].began, spans[0].ended, spans[0].service) == ("call", 10, 30, "mine")
    assert spans[0].attributes == {"texts": 3, "lane": "short"}
    assert not spans[0].failed


def test_a_failed_call_is_marked(receiver: Collector) -> None:
    tracer = Tracer(receiver.url, "mine", pytest.fail, interval_s=0.01)
    tracer.add("call", [PARENT], 10, 30, error="the call failed")
    tracer.close()
    assert receiver.spans()[0].failed


def test_spans_beyond_the_bound_are_lost_and_said() -> None:
    said: list[str] = []
    with collector() as receiver:
        tracer = Tracer(receiver.url, "mine", said.append, interval_s=0.3, most=5)
        for number in range(8):
            tracer.add(f"call {number}", [PARENT], 0, 1)
        tracer.close()
        assert len(receiver.spans()) == 5
    assert said == ["3 spans were lost: more than 5 waited; trace fewer requests (TRACE_RATE)"]


def test_a_collector_that_does_not_answer_is_said_once_and_holds_nobody_up() -> None:
    said: list[str] = []
    with collector() as gone:
        url = gone.url
    tracer = Tracer(url, "mine", said.append, interval_s=0.01)
    for _ in range(3):
        began = time.perf_counter()
        tracer.add("call", [PARENT], 0, 1)
        assert time.perf_counter() - began < 0.5
        time.sleep(0.1)
    tracer.close()
    assert len(said) == 1
    assert "spans were lost" in said[0]
    assert url in said[0]


def test_without_an_address_there_is_no_tracer() -> None:
    assert open_tracer({}, pytest.fail) is None
    assert open_tracer({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "jaeger"}, pytest.fail) is None
