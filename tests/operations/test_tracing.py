"""Traces of a real server: OTLP from tritonserver 2.51 and from the entry's own processes, to one collector."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from builders.errors import ServerError
from builders.ports import free_ports
from builders.serving.entry.tracing import SERVICE_VARIABLE, URL_VARIABLE
from builders.tracing import Traces
from tests.builders.test_serve import printed_until, serving
from tests.builders.test_server import tiny_repository
from tests.operations.collector import collector
from tests.operations.conftest import Watched
from tests.operations.container import compose, script
from tests.tools.load import text_input
from tests.tools.repositories import ROOT
from tests.tools.waiting import until

SHORT, LONG = "How far is the moon?", "moon " * 50
tracing, logs = script("tracing"), script("logs")


def ask(watched: Watched, texts: list[str], **headers: str) -> None:
    """Over HTTP: of the traces that gRPC requests ask for, Triton 2.51 does not make a few (docs/tracing.md)."""
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    body = json.dumps({"id": "mine", "parameters": {"priority": 1}, "inputs": [tensor]})
    connection = http.client.HTTPConnection("127.0.0.1", watched.server.ports.http, timeout=30)
    with closing(connection):
        connection.request("POST", "/v2/models/encode/infer", body, headers)
        answer = connection.getresponse()
        outputs = json.loads(answer.read())["outputs"]
    assert {"name": "EMBEDDING", "shape": [len(texts), 384]}.items() <= outputs[0].items()


def asked_over_grpc(watched: Watched) -> str:
    """The trace of one request over gRPC."""
    trace, caller = new_trace()
    with triton.InferenceServerClient(f"127.0.0.1:{watched.server.ports.grpc}") as client:
        client.infer("encode", [text_input([SHORT])], headers={"traceparent": f"00-{trace}-{caller}-01"})
    return trace


def new_trace() -> tuple[str, str]:
    return secrets.token_hex(16), secrets.token_hex(8)


def test_a_trace_shows_the_request_the_entry_tokenise_and_each_lane(watched: Watched) -> None:
    trace, caller = new_trace()
    ask(watched, [SHORT, SHORT, LONG], traceparent=f"00-{trace}-{caller}-01")
    names = {"InferRequest", "encode", "compute", "tokenise", "encoder_32", "encoder_64"}
    spans = watched.collector.wait(trace, names)
    assert spans["InferRequest"].parent == caller
    assert spans["encode"].parent == spans["InferRequest"].own
    assert spans["encode"].attributes["triton.request_id"] == "mine"
    assert {"QUEUE_START", "REQUEST_END"} <= set(spans["encode"].events)
    for name in ("compute", "tokenise", "encoder_32", "encoder_64"):
        assert spans[name].parent == spans["encode"].own, name
    assert spans["encoder_32"].attributes == {"bucket": 32, "texts": 2, "tokens": 16}
    assert spans["encoder_64"].attributes["texts"] == 1
    assert {span.service for span in spans.values()} == {"encoder-lanes"}
    # In this order, inside the entry: both sides use the machine's clock.
    assert spans["encode"].began <= spans["tokenise"].began <= spans["tokenise"].ended
    assert spans["tokenise"].ended <= spans["encoder_32"].began <= spans["encoder_32"].ended
    # The long lane is called after `execute` has returned, within the request.
    assert spans["encoder_64"].ended <= spans["InferRequest"].ended


def test_each_of_the_requests_of_a_batch_has_the_lane_in_its_own_trace(watched: Watched) -> None:
    traces = [new_trace() for _ in range(12)]
    headers = [f"00-{trace}-{caller}-01" for trace, caller in traces]
    with ThreadPoolExecutor(len(headers)) as pool:
        list(pool.map(lambda header: ask(watched, [SHORT], traceparent=header), headers))
    found = [watched.collector.wait(trace, {"encode", "encoder_32"})["encoder_32"] for trace, _ in traces]
    assert max(span.attributes["texts"] for span in found) > 1


def test_requests_over_grpc_have_their_traces_too_if_not_every_one(watched: Watched) -> None:
    traces = [asked_over_grpc(watched) for _ in range(12)]
    names = {"InferRequest", "encode", "tokenise", "encoder_32"}

    def complete() -> int:
        return sum(names <= {span.name for span in watched.collector.spans(trace)} for trace in traces)

    assert until(lambda: complete() == len(traces), 4.0) or complete() >= len(traces) - 3


def test_a_request_without_a_trace_and_the_wake_ups_leave_none(watched: Watched) -> None:
    trace, caller = new_trace()
    before = len(watched.collector.spans())
    ask(watched, [SHORT])
    ask(watched, [SHORT], traceparent=f"00-{trace}-{caller}-01")
    watched.collector.wait(trace, {"InferRequest", "encode", "tokenise", "encoder_32"})
    time.sleep(1.5)
    others = [span for span in watched.collector.spans()[before:] if span.trace != trace]
    assert others == []


def test_a_collector_that_is_gone_costs_no_request_and_is_said_once(watched: Watched) -> None:
    watched.collector.status = 503
    try:
        for _ in range(2):
            trace, caller = new_trace()
            ask(watched, [SHORT], traceparent=f"00-{trace}-{caller}-01")
            time.sleep(1.2)
        log = [json.loads(line) for line in watched.server.log.read_text(encoding="utf-8").splitlines()]
        said = [line for line in log if "spans were lost" in line["message"]]
        # Each of the two processes may have had its turn.
        assert 1 <= len(said) <= 2
        assert said[0]["level"] == "warning"
        assert watched.collector.url in said[0]["message"]
    finally:
        watched.collector.status = 200
    trace, caller = new_trace()
    ask(watched, [SHORT], traceparent=f"00-{trace}-{caller}-01")
    watched.collector.wait(trace, {"InferRequest", "encode", "tokenise", "encoder_32"})


def test_the_whole_log_is_json_with_the_servers_own_levels_and_places(watched: Watched) -> None:
    lines = watched.server.log.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert all({"time", "level", "source", "message"} <= set(entry) for entry in entries)
    started = [entry for entry in entries if "Started GRPCInferenceService" in entry["message"]]
    assert started[0]["source"] == "tritonserver"
    assert re.fullmatch(r"grpc_server\.cc:\d+", started[0]["place"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", started[0]["time"])
    assert any(entry["source"] == "launch" for entry in entries)


@pytest.mark.parametrize(
    ("line", "level", "place", "message"),
    [
        ('2026-01-02T03:04:05Z W 7 model.py:9] "said \\"so\\"\\nand so"', "warning", "model.py:9", 'said "so"\nand so'),
        ("I0102 03:04:05.123456 7 pb_stub.cc:2145]  Non-graceful termination", "info", "pb_stub.cc:2145",
         "Non-graceful termination"),
        ("| model | version |", "info", None, "| model | version |"),
    ],
)  # fmt: skip
def test_a_line_of_the_log_becomes_an_object(line: str, level: str, place: str | None, message: str) -> None:
    entry = json.loads(logs.as_json(line))
    assert (entry["level"], entry.get("place"), entry["message"]) == (level, place, message)


def test_serve_sends_traces_to_the_same_place_with_the_same_flags_as_the_launcher(tmp_path: Path) -> None:
    with collector() as found:
        environment = {"TRACES_URL": found.url, "TRACE_RATE": "1"}
        traces = Traces(found.url, 1)
        assert traces.flags() == tracing.trace_flags(environment)
        assert traces.variables() == tracing.trace_variables(environment)
        ports = free_ports()
        extra = f'traces=__import__("builders.tracing").tracing.Traces("{found.url}", 1)'
        with serving(tiny_repository(tmp_path), ports, extra) as process:
            printed_until(process, "Ctrl-C stops")
            trace, caller = new_trace()
            with triton.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
                seconds = triton.InferInput("SECONDS", [1], "FP32")
                seconds.set_data_from_numpy(np.zeros(1, np.float32))
                client.infer("probe", [seconds], headers={"traceparent": f"00-{trace}-{caller}-01"})
            assert found.wait(trace, {"InferRequest", "probe"})["InferRequest"].parent == caller
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("url", "rate", "said"),
    [
        ("jaeger:4318", 0, r"--traces-url http://127\.0\.0\.1:4318/v1/traces"),
        ("http://jaeger:4318", 0, "give an address with its path"),
        ("http://a/b,count=1", 0, "no commas"),
        ("http://a/b", -1, "no such rate"),
    ],
)
def test_serve_refuses_an_address_or_a_rate_that_cannot_be_used(url: str, rate: int, said: str) -> None:
    with pytest.raises(ServerError, match=said):
        Traces(url, rate)


def test_without_an_address_nothing_is_traced() -> None:
    assert tracing.trace_flags({}) == []
    assert tracing.trace_flags({"TRACES_URL": "", "TRACE_RATE": "5"}) == []
    assert tracing.trace_variables({"TRACES_URL": ""}) == {}


def test_with_an_address_server_and_entry_send_to_it() -> None:
    environment = {"TRACES_URL": "http://jaeger:4318/v1/traces", "TRACE_RATE": "100"}
    flags = tracing.trace_flags(environment)
    assert "--trace-config=rate=100" in flags
    assert "--trace-config=opentelemetry,url=http://jaeger:4318/v1/traces" in flags
    variables = tracing.trace_variables(environment)
    assert variables == {URL_VARIABLE: "http://jaeger:4318/v1/traces", SERVICE_VARIABLE: "encoder-lanes"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TRACES_URL": "jaeger:4318"}, "TRACES_URL is 'jaeger:4318': give an address with its path"),
        ({"TRACES_URL": "http://jaeger:4318"}, "give an address with its path"),
        ({"TRACES_URL": "http://a/b,count=1"}, "give an address"),
        ({"TRACES_URL": "http://a/b", "TRACE_RATE": "1%"}, "TRACE_RATE is '1%'"),
    ],
)
def test_an_address_or_a_rate_that_cannot_be_used_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(script("repository").LaunchError, match=re.escape(said)):
        tracing.trace_flags(environment)


def test_an_unknown_format_of_the_log_is_refused() -> None:
    with pytest.raises(ValueError, match="LOG_FORMAT is 'xml': give text or json"):
        logs.is_json({"LOG_FORMAT": "xml"})


def test_compose_sends_traces_to_jaeger_when_asked() -> None:
    services: dict[str, Any] = compose()["services"]
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    address = re.search(r"http://(\w+):4318/v1/traces", example)
    assert address is not None
    assert address[1] in services
    assert set(services[address[1]]["networks"]) & set(services["triton"]["networks"])
    assert address[0] in Path(ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
