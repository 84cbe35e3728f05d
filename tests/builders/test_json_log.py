"""The lines of `serve --log-format json`."""

from __future__ import annotations

import json
from datetime import datetime

from builders.json_log import event_line, json_line
from builders.triton_log import ServerEvent
from tests.operations.container import script


def test_a_line_holds_one_object_with_the_names_of_the_containers_log() -> None:
    found = json.loads(json_line("info", 'two\nlines, "quotes", Я'))
    assert set(found) == {"time", "level", "source", "message"} == set(json.loads(script("logs").as_json("x")))
    assert found["message"] == 'two\nlines, "quotes", Я'
    assert "\n" not in json_line("info", "two\nlines")
    assert datetime.fromisoformat(found["time"]).tzinfo is not None


def test_an_event_has_its_kind_and_its_model_and_is_as_bad_as_it_says() -> None:
    failed = json.loads(event_line(ServerEvent("failed", "no such file", 1.5, "encode", 3)))
    assert (failed["level"], failed["event"], failed["model"], failed["version"]) == ("error", "failed", "encode", 3)
    endpoint = json.loads(event_line(ServerEvent("endpoint", "Started HTTPService at 127.0.0.1:8000")))
    assert endpoint["level"] == "info"
    assert not {"model", "version"} & set(endpoint)
