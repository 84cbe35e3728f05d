"""Which version of a lane or of a step the launcher asks, and whose answers to others it counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from builders import names
from tests.operations.container import script
from tests.operations.played_server import DEADLINE_S, NATIVE, Played, look, playing_server, watching

watch, repository = script("watch"), script("repository")


@pytest.fixture
def played() -> Iterator[Played]:
    with playing_server() as server:
        yield server


def test_lanes_and_steps_are_told_by_their_names_and_nothing_else_is() -> None:
    called = (names.lane_model, names.queued_model, names.tokenize_model)
    for name in ("", "minilm", "a_2b", "x_queued"):
        for made in called:
            found = watch._CALLED.fullmatch(made(name, 128))
            assert found is not None
            assert f"encode{found[1] or ''}" == names.entry_model(name)
        assert watch._CALLED.fullmatch(names.entry_model(name)) is None
        assert watch._CALLED.fullmatch(names.ensemble_model(name, 128)) is None


def test_a_lane_is_asked_in_the_served_version_and_not_where_nobody_calls_it(played: Played) -> None:
    """Triton takes the highest: a bad one that a rollback left, say."""
    played.versions = {"encode": ["1"], "encoder_32": ["1", "2"], "tokenize_32": ["2"], "encoder_64": ["2"]}
    added = [repository.Model(name, False, 0) for name in ("tokenize_32", "encoder_64")]
    played.loaded |= {model.name for model in added}
    found = watching(played, *NATIVE, *added)
    look(found)
    for _ in range(2):
        found.ask_all()
    assert played.paths == ["/v2/models/encode/infer", "/v2/models/encoder_32/versions/1/infer"] * 2
    assert [found.states()[model.name].canary for model in added] == ["unknown", "unknown"]
    assert all(state.ready for state in found.states().values())
    played.versions["encode"] = ["1", "2"]  # A promote changes over.
    played.paths.clear()
    found.ask_all()
    names = ("encoder_32", "tokenize_32", "encoder_64")
    assert played.paths[1:] == [f"/v2/models/{name}/versions/2/infer" for name in names]
    # A server that does not say: as before, not what Triton would take.
    played.versions |= {"encode": [], "encoder_32": ["1", "2", "3"]}
    played.paths.clear()
    found.ask_all()
    assert played.paths[1] == "/v2/models/encoder_32/versions/2/infer"


def test_a_lane_that_the_served_version_calls_and_has_not_got_is_not_ready(played: Played) -> None:
    played.versions, played.lanes = {"encode": ["1"], "encoder_32": ["2"]}, ("encoder_32",)
    found = watching(played, *NATIVE)
    look(found)
    for _ in range(2):
        found.ask_all()
    state = found.states()["encoder_32"]
    assert (state.ready, state.canary, state.said) == (False, "failed", "encoder_32 has no statistics")


def of_two_versions(played: Played, served: str) -> Any:
    """A watch of a lane that has two versions, after its first look."""
    played.versions = {"encode": [served], "encoder_32": ["1", "2"]}
    found = watching(played, NATIVE[1])
    look(found)
    return found


def test_a_version_is_asked_anew_when_the_one_before_hangs(played: Played) -> None:
    found, played.silent = of_two_versions(played, "2"), "2"
    for _ in range(2):
        found.ask_all()
    assert (found.states()["encoder_32"].canary, len(played.paths)) == ("hung", 1)
    played.versions["encode"] = ["1"]
    found.ask_all()
    assert (found.states()["encoder_32"].canary, found.fatal()) == ("ok", {})
    played.versions["encode"] = ["2"]
    for _ in range(2):
        found.ask_all()
    assert found.states()["encoder_32"].canary == "hung"
    assert [path.split("/")[5] for path in played.paths] == ["2", "1", "2"]


@pytest.mark.parametrize(("answering", "canary"), [("1", "busy"), ("2", "hung")], ids=["served", "on-trial"])
def test_silence_is_a_long_queue_only_when_the_same_version_answers_others(
    answering: str, canary: str, played: Played
) -> None:
    found, played.silent = of_two_versions(played, "1"), "1"
    played.while_asked = lambda: played.answered_by.update({answering: played.answered_by.get(answering, 0) + 3})
    for _ in range(2):
        found.ask_all()
        assert found.states()["encoder_32"].canary == canary


@pytest.mark.parametrize(("answering", "canary"), [("1", "busy"), ("2", "hung")], ids=["served", "on-trial"])
def test_a_queue_that_rejects_is_full_only_when_the_same_version_answers_others(
    answering: str, canary: str, played: Played
) -> None:
    found = of_two_versions(played, "1")
    played.status, played.error = 503, "Exceeds maximum queue size"
    found.ask_all()
    time.sleep(DEADLINE_S * 1.2)
    played.answered_by[answering] = 3
    found.ask_all()
    assert found.states()["encoder_32"].canary == canary


@pytest.mark.parametrize("versions", [None, "ab", ["new"], 7])
def test_the_round_goes_on_when_the_servers_answer_makes_no_sense(versions: Any, played: Played) -> None:
    played.versions = {"encode": versions}
    found = watching(played, *NATIVE)
    look(found)
    found.ask_all()
    assert played.paths == ["/v2/models/encode/infer", "/v2/models/encoder_32/infer"]


def test_a_version_is_not_hung_when_another_is_promoted_while_it_is_asked(played: Played) -> None:
    found, played.silent = of_two_versions(played, "1"), "1"
    played.while_asked = lambda: played.versions.update(encode=["1", "2"])
    found.ask_all()
    assert (found.states()["encoder_32"].canary, found.fatal()) == ("unknown", {})
    found.ask_all()
    assert found.states()["encoder_32"].canary == "ok"


def test_errors_of_two_versions_are_not_two_in_a_row(played: Played) -> None:
    found = of_two_versions(played, "1")
    played.status, played.error = 500, "no such bucket"
    found.ask_all()
    played.versions["encode"] = ["2"]
    found.ask_all()
    assert found.states()["encoder_32"].ready
    found.ask_all()
    assert not found.states()["encoder_32"].ready
