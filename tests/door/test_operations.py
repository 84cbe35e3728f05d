"""Health, models, metrics, logs, priorities, traces; the command itself."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from pydantic import ValidationError
from tritonclient.grpc import service_pb2
from typer.testing import CliRunner

from clients.cli import app
from clients.door import catalog
from clients.door.command import unknown_variables
from clients.door.log import JsonLines
from clients.door.settings import DoorSettings
from tests.clients.fake_triton import FakeTriton, serve
from tests.door.conftest import MODELS
from tests.door.doors import RunningDoor, running
from tests.tools.waiting import until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_health_follows_the_models(door: RunningDoor, triton: FakeTriton) -> None:
    reply = door.get("/health")
    assert (reply.status, reply.json["status"], set(reply.json["models"].values())) == (200, "ready", {True})
    triton.ready = False
    assert until(lambda: door.get("/health").status == 503)
    assert door.get("/health").json["models"]["encode"] is False
    assert door.metric("door_model_ready", model="encode") == 0


def test_one_ill_model_leaves_the_door_ready_and_is_told_by_the_metrics_unasked() -> None:
    with serve() as triton, running(triton.url, models=MODELS, refresh_s=0.05) as door:
        known = triton.reply

        def answer(kind: str, name: str = "", version: str = "") -> Any:
            ill = kind == "ready" and name == "encode_topics"
            return service_pb2.ModelReadyResponse(ready=False) if ill else known(kind, name, version)

        triton.reply = answer  # type: ignore[method-assign]
        assert until(lambda: door.get("/metrics").body.count(b"door_model_ready{") == len(MODELS.split(",")))
        assert until(lambda: door.metric("door_model_ready", model="encode_topics") == 0)
        assert door.metric("door_model_ready", model="encode") == 1
        assert door.get("/health").status == 503
        reply = door.get("/health/ready")
        assert (reply.status, reply.json) == (200, {"status": "ready"})
        assert door.embed().status == 200


def test_model_that_the_server_lost_counts_as_not_ready_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as triton, running(triton.url, refresh_s=0.05) as door:
        assert until(lambda: door.metric("door_model_ready", model="encode") == 1)
        known = triton.reply

        def answer(kind: str, name: str = "", version: str = "") -> Any:
            nothing = {"index": service_pb2.RepositoryIndexResponse, "statistics": service_pb2.ModelStatisticsResponse}
            return nothing[kind]() if kind in nothing else known(kind, name, version)

        triton.reply = answer  # type: ignore[method-assign]
        assert until(lambda: door.metric("door_model_ready", model="encode") == 0)
        assert b'door_model_ready{model="encode"} 0.0' in door.get("/metrics").body
        monkeypatch.setattr(catalog, "_GONE_S", 0.0)
        assert until(lambda: b"door_model_ready{" not in door.get("/metrics").body)


def test_one_server_of_several_that_answers_nothing_leaves_the_door_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.door.catalog._KEPT_S", 0.0)
    with serve() as triton, serve() as silent:
        over = threading.Event()
        known = silent.reply

        def answer(kind: str, name: str = "", version: str = "") -> Any:
            over.wait(20.0)
            return known(kind, name, version)

        silent.reply = answer  # type: ignore[method-assign]
        try:
            with running(f"ipv4:///{triton.url},{silent.url}", models="encode") as door:
                # Until the door is connected with both.
                assert until(lambda: door.get("/health/ready").status == 200)
                began = time.monotonic()
                assert [door.get("/health/ready").status for _ in range(6)] == [200] * 6
                assert time.monotonic() - began < 2.0
        finally:
            over.set()


def test_several_servers_behind_one_address_are_called_in_turn() -> None:
    with serve() as one, serve() as other:
        servers = ",".join(fake.url for fake in (one, other))
        with running(f"ipv4:///{servers}", models="encode") as door:
            assert until(lambda: door.embed().status == 200 and one.seen and other.seen)
            before = len(one.seen), len(other.seen)
            assert [door.embed().status for _ in range(10)] == [200] * 10
            assert (len(one.seen) - before[0], len(other.seen) - before[1]) == (5, 5)


def test_models_are_those_the_server_has_loaded_when_none_are_named(triton: FakeTriton) -> None:
    with running(triton.url) as door:
        assert until(lambda: door.get("/v1/models").json["data"])
        (model,) = door.get("/v1/models").json["data"]
        assert (model["id"], model["object"], model["task"], model["size"]) == ("encode", "model", "embedding", 8)
        assert door.get("/v1/models/encode").json == model
        assert door.get("/v1/models/encoder_128").error["code"] == "model_not_found"


def test_model_that_is_not_loaded_is_unavailable_and_an_unknown_one_is_not_found(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = triton.reply

    def reply(kind: str, name: str = "", version: str = "") -> Any:
        if name == "encode_late":
            raise RuntimeError("not loaded")
        return known(kind, name, version)

    monkeypatch.setattr(triton, "reply", reply)
    with running(triton.url, models="encode,encode_late") as door:
        body = {"input": "a"}
        assert door.post("/v1/embeddings", {**body, "model": "encode"}).status == 200
        assert door.post("/v1/embeddings", {**body, "model": "late"}).status == 502
        assert door.post("/v1/embeddings", {**body, "model": "other"}).status == 404
        monkeypatch.undo()
        assert until(lambda: door.post("/v1/embeddings", {**body, "model": "late"}).status == 200)


def test_unknown_path_and_method_are_refused_in_openais_form(door: RunningDoor) -> None:
    reply = door.post("/v1/chat/completions", {})
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert "/v1/embeddings" in reply.error["message"]
    reply = door.get("/v1/embeddings")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert door.metric("door_requests_total", route="other") == 2


@pytest.mark.parametrize(
    ("given", "level", "name"),
    [(None, 2, "background"), ("interactive", 1, "interactive"), (" Background", 2, "background")],
)
def test_priority_header_sets_level_and_class(
    door: RunningDoor, triton: FakeTriton, given: str | None, level: int, name: str
) -> None:
    assert door.embed(**({} if given is None else {"X_Priority": given})).status == 200
    assert (triton.seen[0].parameters["priority"], triton.seen[0].parameters["class"]) == (level, name)
    assert door.metric("door_requests_total", priority=name, route="/v1/embeddings", status="200") == 1
    assert door.embed(X_Priority="urgent").error["param"] == "x-priority"


def test_trace_is_passed_on_and_a_wrong_one_is_not(door: RunningDoor, triton: FakeTriton) -> None:
    door.embed(traceparent=TRACE, tracestate="vendor=1")
    door.embed(traceparent="nonsense", tracestate="vendor=1")
    assert triton.seen[0].headers["traceparent"] == TRACE
    assert triton.seen[0].headers["tracestate"] == "vendor=1"
    assert triton.seen[1].headers.get("traceparent") != "nonsense"
    assert "tracestate" not in triton.seen[1].headers


def test_metrics_count_what_was_answered(door: RunningDoor) -> None:
    door.embed(["abc", "x" * 20])
    door.embed([])
    assert door.metric("door_requests_total", status="200") == 1
    assert door.metric("door_requests_total", status="400") == 1
    assert door.metric("door_request_duration_seconds_count", route="/v1/embeddings", priority="background") == 2
    assert door.metric("door_texts_total", model="encode") == 2
    assert door.metric("door_tokens_total", model="encode") == 23
    assert door.metric("door_cut_tokens_total", model="encode") == 2


def test_log_has_one_line_a_request_and_no_text(
    door: RunningDoor, caplog: pytest.LogCaptureFixture, triton: FakeTriton
) -> None:
    caplog.set_level("INFO", "clients.door")
    reply = door.embed("a secret text", X_Request_Id="mine-1", traceparent=TRACE)
    assert (reply.headers["x-request-id"], reply.headers["x-cut-tokens"]) == ("mine-1", "1")
    door.embed(["a secret text", 3])
    records = [one for one in caplog.records if one.message == "request"]
    lines = [json.loads(JsonLines().format(one)) for one in records]
    assert [one["status"] for one in lines] == [200, 400]
    good = {"request_id": "mine-1", "key": "anybody", "route": "/v1/embeddings", "model": "encode", "texts": 1,
            "tokens": 13, "cut": 1, "priority": "background", "trace_id": TRACE[3:35], "event": "request"}  # fmt: skip
    assert good.items() <= lines[0].items()
    assert lines[1]["code"] == "invalid_value"
    assert "secret" not in json.dumps(lines)


def test_log_line_keeps_a_traceback_in_one_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.Logger("one")
    logger.addHandler(handler)
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: wrong" in json.loads(line)["traceback"]


@pytest.mark.parametrize(
    "wrong",
    [{"listen": "8080"}, {"listen": "h:99999"}, {"aliases": "a"}, {"deadline_s": 0}, {"keys": "/nowhere"},
     {"certificate": __file__}],
)  # fmt: skip
def test_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DoorSettings(**wrong)


def test_address_may_be_of_ipv6() -> None:
    settings = DoorSettings(listen="[::1]:0")
    assert (settings.host, settings.port) == ("::1", 0)


def command(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clients", "door", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def test_command_serves_logs_in_json_and_lets_a_request_end_when_it_is_stopped(triton: FakeTriton) -> None:
    triton.delay = lambda texts: 0.5
    process = command("--listen", "127.0.0.1:0", DOOR_TRITON=triton.url, DOOR_MODELS="encode")
    try:
        assert process.stdout is not None
        port = 0
        while not port:
            event = json.loads(process.stdout.readline())["event"]
            port = int(event.split("://127.0.0.1:")[1].split()[0]) if "running on" in event else 0
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(RunningDoor(port).embed().status))
        thread.start()
        assert until(lambda: triton.seen)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert statuses == [200]
        out, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert errors == ""
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["status"] for line in lines if line["event"] == "request"] == [200]


def test_variables_that_are_no_setting_are_named() -> None:
    assert unknown_variables({"DOOR_KEY": "", "DOOR_KEYS": "", "DOOR_PORT": "", "KEYS": ""}) == [
        "DOOR_KEY",
        "DOOR_PORT",
    ]


def test_command_describes_itself_and_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOOR_LISTEN", "127.0.0.1:0")

    def said(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["door", *arguments])
        return result.exit_code, result.output

    code, text = said("--help")
    assert code == 0
    assert all(f"--{name.replace('_', '-')} " in text for name in DoorSettings.model_fields)
    for arguments, what in (
        (["--max-inputs", "0"], "max_inputs (--max-inputs, DOOR_MAX_INPUTS): "),
        (["--keys", __file__], "the key in line 1 is too short"),
        (["--tokenizer", __file__], "the tokenizer cannot be read"),
        (["--triton", "ftp://a"], "url has an unknown scheme"),
        (["--nonsense"], "--nonsense"),
    ):
        code, text = said(*arguments)
        assert code == 2
        assert what in text


def test_command_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "clients.door.app", None)
    result = CliRunner().invoke(app, ["door"])
    assert result.exit_code == 1
    assert "install the extra `door`" in result.output
