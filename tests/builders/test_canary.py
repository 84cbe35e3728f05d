"""The canary against a server that is played: what it finds, and which version it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from builders.canary import NOT_CALLED, Canary, CanarySettings, Finding, smallest_input
from builders.http_api import HttpApi
from builders.ports import free_ports
from builders.supervisor import served_version
from tests.builders.played_models import QUICK, TEXT, Played, playing_models
from tests.tools.played import HOST, playing
from tests.tools.waiting import until


@pytest.fixture
def played() -> Iterator[Played]:
    with playing_models() as server:
        yield server


def canary(played: Played) -> Canary:
    return Canary(played.api(), "encode", QUICK, lambda model, finding: None)


def test_canary_finds_a_model_well_when_it_answers(played: Played) -> None:
    one = canary(played)
    assert [one.ask().health for _ in range(2)] == ["ok", "ok"]
    assert (one.last.times, one.last.text) == (2, "")


def test_canary_finds_a_model_failed_when_it_answers_with_an_error(played: Played) -> None:
    played.status, played.error = 500, "the engine is broken"
    assert (found := canary(played).ask()).health == "failed"
    assert found.text == "the engine is broken"


def test_canary_finds_a_model_busy_when_it_is_silent_but_others_are_answered(played: Played) -> None:
    played.delay_s, played.others = 0.6, 3
    # The count moves behind the deadline here: play that it had moved before it.
    one = canary(played)
    real = one._progress
    one._progress = lambda: real() + len(played.asked)  # type: ignore[method-assign]
    found = one.ask()
    assert found.health == "busy"
    assert "others got one" in found.text


def test_canary_finds_a_model_hung_and_asks_no_more_until_it_works_again(played: Played) -> None:
    played.delay_s = 0.6
    one = canary(played)
    assert [one.ask().health for _ in range(3)] == ["hung", "hung", "hung"]
    assert len(played.asked) == 1
    played.delay_s, played.answered = 0.0, 1
    assert one.ask().health == "ok"


def test_canary_finds_a_model_hung_when_its_queue_rejects_and_nobody_is_answered(played: Played) -> None:
    played.status, played.error = 503, "Request timeout expired"
    one = canary(played)
    assert one.ask().health == "busy"
    time.sleep(QUICK.deadline_s)
    assert one.ask().health == "hung"
    played.answered += 1
    assert one.ask().health == "busy"


def test_canary_starts_anew_when_the_model_was_loaded_again(played: Played) -> None:
    played.delay_s = 0.6
    one = canary(played)
    assert one.ask().health == "hung"
    played.delay_s = 0.0
    one.forget()
    # Nothing was computed since: the count alone would still say that it hangs.
    assert one.ask().health == "ok"


def test_canary_finds_a_model_failed_when_no_server_is_there() -> None:
    one = Canary(HttpApi(HOST, 9), "encode", QUICK, lambda model, finding: None)
    assert one.ask().health == "failed"


def test_canary_asks_on_when_what_it_found_could_not_be_told(played: Played) -> None:
    told: list[Finding] = []

    def found(model: str, finding: Finding) -> None:
        told.append(finding)
        raise RuntimeError("planted")

    one = Canary(played.api(), "encode", CanarySettings(every_s=0.01, deadline_s=1.0), found)
    one.start()
    try:
        assert until(lambda: len(told) >= 3)
    finally:
        one.close()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (TEXT, ([1, 1], ["canary"])),
        ({"name": "input_ids", "datatype": "INT32", "shape": [-1, 4]}, ([1, 4], [0, 0, 0, 0])),
        ({"name": "length", "datatype": "INT32", "shape": [-1, 1]}, ([1, 1], [1])),
    ],
)
def test_smallest_input_fits_the_metadata(tensor: dict[str, object], expected: tuple[list[int], list[object]]) -> None:
    made = smallest_input(tensor)
    assert (made["shape"], made["data"]) == expected


# ── which version ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_canary_asks_the_version_that_is_served_when_a_higher_one_is_loaded_beside_it(played: Played) -> None:
    """Triton would take the highest: one on trial, or a bad one that a rollback left."""
    entries = ("encode", "encode_minilm")
    played.versions = {
        **{"encode": (2,), "encoder_16": (2,), "encoder_32": (1,)},
        **{"encode_minilm": (1,), "encoder_minilm_16": (1, 3), "encoder_minilm_16_queued": (1, 3)},
        **{"tokenize_minilm_16": (3,), "ensemble_minilm_16": (1,)},
    }
    assert {model: served_version(played.api(), entries, model) for model in played.versions} == {
        **{"encode": None, "encoder_16": 2, "encoder_32": NOT_CALLED},
        **{"encode_minilm": None, "encoder_minilm_16": 1, "encoder_minilm_16_queued": 1},
        **{"tokenize_minilm_16": NOT_CALLED, "ensemble_minilm_16": None},
    }
    version = partial(served_version, played.api(), entries, "encoder_minilm_16")
    asking = Canary(played.api(), "encoder_minilm_16", QUICK, lambda model, finding: None, version)
    assert asking.ask().health == "ok"
    assert played.asked == ["/v2/models/encoder_minilm_16/versions/1/infer"]
    # A promote changes over: what is ready last is what is served.
    played.versions["encode_minilm"] = (1, 3)
    assert asking.ask().health == "ok"
    assert played.asked[1:] == ["/v2/models/encoder_minilm_16/versions/3/infer"]


@pytest.mark.parametrize("served", [1, 3], ids=["after-a-rollback", "after-a-promote"])
def test_step_or_lane_is_not_asked_when_the_served_version_does_not_call_it(served: int, played: Played) -> None:
    """It stays loaded for the way back; whatever it is like, no request comes to it."""
    played.versions = {"encode": (served,), "encoder_16": (2,), "tokenize_16": (2,), "encoder_16_queued": (2,)}
    played.status, played.error = 500, "version 2 is bad"
    for model in ("encoder_16", "tokenize_16", "encoder_16_queued"):
        asking = asking_served(played, model)
        assert [asking.ask().health for _ in range(2)] == ["unknown", "unknown"]
        played.versions["encode"] = (served, 2) if served == 1 else (2,)
        assert [asking.ask().health for _ in range(2)] == ["failed", "failed"]
        played.versions["encode"] = (served,)
        assert asking.ask().health == "unknown"


def test_lane_fails_when_the_served_version_calls_it_and_it_has_no_such_version(played: Played) -> None:
    played.versions, played.lanes = {"encode": (1,), "encoder_16": (2,), "encoder_32": ()}, ("encoder_16", "encoder_32")
    for model in played.lanes:
        found = asking_served(played, model).ask()
        assert (found.health, "unknown version" in found.text) == ("failed", True)
    assert played.asked == []


def asking_served(played: Played, model: str = "encoder_16") -> Canary:
    version = partial(served_version, played.api(), ("encode",), model)
    return Canary(played.api(), model, QUICK, lambda model, finding: None, version)


def test_version_is_asked_anew_when_the_one_before_hangs(played: Played) -> None:
    played.versions, played.silent = {"encode": (2,), "encoder_16": (1, 2)}, {2}
    asking = asking_served(played)
    assert [asking.ask().health for _ in range(2)] == ["hung", "hung"]
    played.versions["encode"] = (1,)
    assert asking.ask().health == "ok"
    played.versions["encode"] = (2,)
    assert [asking.ask().health for _ in range(2)] == ["hung", "hung"]
    assert [path[-7] for path in played.asked] == ["2", "1", "2"]


@pytest.mark.parametrize(("answering", "health"), [(1, "busy"), (2, "hung")], ids=["served", "on-trial"])
def test_silence_is_a_long_queue_only_when_the_same_version_answers_others(
    answering: int, health: str, played: Played
) -> None:
    played.versions, played.silent = {"encode": (1,), "encoder_16": (1, 2)}, {1}
    asking = asking_served(played)
    real = asking._infer

    def others() -> tuple[str, str]:
        played.answered_by[answering] = played.answered_by.get(answering, 0) + 3
        return real()

    asking._infer = others  # type: ignore[method-assign, assignment]
    assert [asking.ask().health for _ in range(2)] == [health, health]


@pytest.mark.parametrize(("answering", "health"), [(1, "busy"), (2, "hung")], ids=["served", "on-trial"])
def test_queue_that_rejects_is_full_only_when_the_same_version_answers_others(
    answering: int, health: str, played: Played
) -> None:
    played.versions, played.status, played.error = {"encode": (1,), "encoder_16": (1, 2)}, 503, "Exceeds maximum queue"
    asking = asking_served(played)
    assert asking.ask().health == "busy"
    time.sleep(QUICK.deadline_s)
    played.answered_by[answering] = 3
    assert asking.ask().health == health


def test_silence_is_no_hang_when_the_model_was_loaded_anew_meanwhile(played: Played) -> None:
    # Triton counts from 0 again, and what had to wait for the load waits for the queue as well.
    played.versions, played.silent = {"encode": (1,), "encoder_16": (1,)}, {1}
    played.answered_by[1] = 100
    asking = asking_served(played)
    real = asking._infer

    def loaded_anew() -> tuple[str, str]:
        played.answered_by[1] = 3
        return real()

    asking._infer = loaded_anew  # type: ignore[method-assign, assignment]
    found = asking.ask()
    assert (found.health, found.version) == ("busy", 1)
    assert "loaded anew" in found.text


def test_version_is_not_hung_when_another_was_promoted_while_it_was_asked(played: Played) -> None:
    played.versions, played.silent = {"encode": (1,), "encoder_16": (1, 2)}, {1}
    asking = asking_served(played)
    real = asking._infer

    def promoted() -> tuple[str, str]:
        played.versions["encode"] = (1, 2)
        return real()

    asking._infer = promoted  # type: ignore[method-assign, assignment]
    assert [asking.ask().health for _ in range(2)] == ["unknown", "ok"]


def test_errors_of_two_versions_are_not_two_in_a_row(played: Played) -> None:
    played.versions, played.status = {"encode": (1,), "encoder_16": (1, 2)}, 500
    asking = asking_served(played)
    assert asking.ask().times == 1
    played.versions["encode"] = (2,)
    assert [asking.ask().times for _ in range(2)] == [1, 2]


def test_version_is_the_last_one_known_when_the_server_does_not_say(played: Played) -> None:
    played.versions = {"encode": (1,), "encoder_16": (1, 2)}
    asking = asking_served(played)
    assert asking.ask().health == "ok"
    for silent in ({"encode": ()}, {"encode": (3,), "encoder_16": (1, 2)}):
        played.versions.update(silent)
        played.lanes = ()
        assert asking.ask().health == "ok"
    assert played.asked == ["/v2/models/encoder_16/versions/1/infer"] * 3


@pytest.mark.parametrize("answer", [None, [], "ab", {"versions": None}, {"versions": ["new"]}, {"versions": [None]}])
def test_version_is_left_to_triton_when_its_answer_makes_no_sense(answer: object) -> None:
    with playing(lambda asked: (200, answer)) as port:
        assert HttpApi(HOST, port).versions("encode") == ()
        assert HttpApi(HOST, port).lanes("encode", 1) == ()
        assert served_version(HttpApi(HOST, port), ("encode",), "encoder_16") is None


def test_version_is_left_to_triton_when_the_server_does_not_say() -> None:
    assert served_version(HttpApi(HOST, free_ports().http), ("encode",), "encoder_16") is None
