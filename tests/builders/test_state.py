"""The state file: what is served, kept whole, and what happens without it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from builders.errors import PublishError, StateError
from builders.lock import repository_lock
from builders.state import Served, read_state, served_now, write_state


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for version in (1, 2, 3):
        (tmp_path / f"r/encode/{version}").mkdir(parents=True)
    return tmp_path / "r"


def test_state_read_as_it_was_written(repository: Path) -> None:
    state = Served(served=2, previous=1, lanes=(1, 2))
    write_state(repository, state)
    assert read_state(repository) == served_now(repository) == state
    assert [path.name for path in repository.iterdir() if path.is_file()] == [".served.json"]


def test_newest_version_served_without_a_state_file(repository: Path, tmp_path: Path) -> None:
    assert read_state(repository) is None
    assert served_now(repository) == Served(served=3, lanes=(3,))
    assert served_now(tmp_path / "none") is None


def test_lanes_of_a_version_that_is_gone_left_out(repository: Path) -> None:
    write_state(repository, Served(served=2, previous=1, lanes=(1, 2)))
    (repository / "encode/1").rmdir()
    assert served_now(repository) == Served(served=2, lanes=(2,))


def test_served_version_that_is_gone_refused_with_what_to_do(repository: Path) -> None:
    write_state(repository, Served(served=2, lanes=(2,)))
    (repository / "encode/2").rmdir()
    with pytest.raises(StateError, match=r"served version is not in .*: 2; limit: published: 1, 3; .*then 3 is served"):
        served_now(repository)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\x00\x01",
        '{"schema_version": 2, "entries": {}}',
        '{"entries": {"encode": {"served": 1, "lanes": [2]}}}',
        '{"entries": {"encode": {"served": 0, "lanes": [0]}}}',
        '{"entries": {"encode": {"served": 1, "lanes": [1], "next": 2}}}',
    ],
)
def test_broken_state_refused_with_the_path_and_what_to_do(repository: Path, text: str) -> None:
    (repository / ".served.json").write_text(text)
    with pytest.raises(StateError, match="to do: restore the file, or remove it: then version 3, the newest") as caught:
        read_state(repository)
    assert str(repository / ".served.json") in str(caught.value)


def test_state_of_before_kept_when_the_disk_is_full(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(repository, Served(served=1, lanes=(1,)))

    def fsync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StateError, match="No space left"):
        write_state(repository, Served(served=2, lanes=(2,)))
    assert json.loads((repository / ".served.json").read_text())["entries"]["encode"]["served"] == 1
    assert not (repository / ".served.json.new").exists()


def test_lock_held_by_one_at_a_time_and_free_again(repository: Path) -> None:
    with (
        repository_lock(repository),
        pytest.raises(PublishError, match=rf"another build.*process {os.getpid()}"),
        repository_lock(repository, wait_s=0.2),
    ):
        pass
    with repository_lock(repository, wait_s=0.2):
        pass
