"""The lease of a version on trial: followed while it holds, and over by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from builders.serving.entry.candidate import LONGEST_S, CandidateWatch, Lease, read_lease, state_file
from builders.serving.entry.trial import Trial
from builders.state import Candidate, Served, write_state
from builders.state import state_file as name_of_state_file
from tests.tools.waiting import until

NOW = 1_800_000_000.0


class OpenTrial:
    """Stands for a trial."""

    def __init__(self, lease: Lease) -> None:
        self.version, self.share = lease.version, lease.share
        self.idle, self.owes, self.closed, self.looks = True, False, False, 0

    def look(self) -> None:
        self.looks += 1

    def close(self) -> None:
        assert self.idle
        self.closed = True


class Site:
    """A state file, a watch on it, and a clock that stands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, NOW
        self.opened: list[OpenTrial] = []
        self.failed: list[str] = []
        self.changes = 0
        self.error: Exception | None = None
        self.watch = CandidateWatch(
            folder / ".served.json", "encode", 1, self.open, self.failed.append, self.changed, lambda: self.now
        )

    def open(self, lease: Lease) -> Trial:
        if self.error is not None:
            raise self.error
        self.opened.append(OpenTrial(lease))
        return self.opened[-1]  # type: ignore[return-value]

    def changed(self) -> None:
        self.changes += 1

    def write(self, **changes: Any) -> None:
        lease = {"version": 2, "share": 0.1, "until": self.now + 15, "deadline_s": 5.0, "entry": {"a": 1}, **changes}
        write_state(self.folder, Served(served=1, lanes=(1,), candidate=Candidate(**lease)))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_lease_read_as_the_command_writes_it(tmp_path: Path) -> None:
    lease = {"version": 2, "share": 0.1, "until": NOW, "deadline_s": 5.0, "entry": {"degrade": None}}
    for name, model in (("", "encode"), ("minilm", "encode_minilm")):
        (tmp_path / model).mkdir()
        path = state_file(tmp_path / model, model)
        assert path == tmp_path / name_of_state_file(name)
        assert read_lease(path, model) is None
        write_state(tmp_path, Served(served=1, lanes=(1,)), name)
        assert read_lease(path, model) is None
        assert "candidate" not in path.read_text()
        write_state(tmp_path, Served(served=1, lanes=(1,), candidate=Candidate(**lease)), name)
        assert read_lease(path, model) == Lease(**lease)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"entries": {"encode": {"candidate": {"version": 2}}}}'])
def test_no_lease_in_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / ".served.json").write_text(text)
    assert read_lease(tmp_path / ".served.json", "encode") is None


def test_trial_lasts_as_long_as_its_lease_is_renewed(site: Site) -> None:
    site.watch.look()
    assert site.watch.trial is None
    site.write()
    site.watch.look()
    assert site.watch.trial is site.opened[0]
    site.now += 10
    site.write(share=0.2)
    site.now += 14
    site.watch.look()
    assert site.watch.trial is site.opened[0]
    assert site.opened[0].share == 0.2
    site.now += 1
    # At once, whether anybody looks or not.
    assert site.watch.trial is None
    site.watch.look()
    assert site.opened[0].closed
    assert site.changes == 2


def test_trial_over_when_the_lease_is_taken_back_or_the_file_is_gone(site: Site) -> None:
    for end in (lambda: write_state(site.folder, Served(served=1, lanes=(1,))), (site.folder / ".served.json").unlink):
        site.write()
        site.watch.look()
        assert site.watch.trial is not None
        end()
        site.watch.look()
        assert site.watch.trial is None
    assert [trial.closed for trial in site.opened] == [True, True]


def test_another_candidate_takes_the_place_of_the_first(site: Site) -> None:
    site.write()
    site.watch.look()
    site.write(version=3)
    site.watch.look()
    assert site.watch.trial is site.opened[1]
    assert site.opened[0].closed


def test_next_trial_opened_only_when_the_last_owes_nothing(site: Site) -> None:
    site.write()
    site.watch.look()
    first = site.opened[0]
    first.owes, first.idle = True, False
    site.write(version=3)
    site.watch.look()
    assert site.watch.trial is None
    assert (len(site.opened), first.looks) == (1, 2), "its deadlines are looked after"
    first.owes = False
    site.watch.look()
    assert site.watch.trial is site.opened[1]


@pytest.mark.parametrize(
    "changes",
    [{"version": 1}, {"until": NOW}, {"until": NOW - 3600}, {"until": NOW + LONGEST_S + 1}],
    ids=["the served version", "over", "long over", "of another clock"],
)
def test_lease_not_followed(site: Site, changes: dict[str, Any]) -> None:
    site.write(**changes)
    site.watch.look()
    assert site.watch.trial is None
    assert site.opened == []


def test_failure_told_once_and_tried_again(site: Site) -> None:
    site.error = RuntimeError("no such lane")
    site.write()
    site.watch.look()
    site.watch.look()
    assert site.failed == ["version 2 is not tried: RuntimeError: no such lane"]
    site.error = None
    site.watch.look()
    assert site.watch.trial is site.opened[0]


def test_trial_with_a_call_that_hangs_looked_after_until_it_is_done(site: Site) -> None:
    site.write()
    site.watch.look()
    site.opened[0].idle = False
    write_state(site.folder, Served(served=1, lanes=(1,)))
    for _ in range(3):
        site.watch.look()
    assert site.opened[0].looks == 4
    assert not site.opened[0].closed
    site.opened[0].idle = True
    site.watch.look()
    assert site.opened[0].closed


def test_file_read_again_only_when_it_is_another_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = Path.read_text

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        reads.append(self)
        return real(self, *args, **options)

    site.write()
    monkeypatch.setattr(Path, "read_text", read_text)
    for _ in range(5):
        site.watch.look()
    assert len(reads) == 1
    site.write(share=0.3)
    site.watch.look()
    assert len(reads) == 2


@pytest.mark.timeout(60)
def test_thread_follows_the_file(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.watch.start()
    site.write()
    assert until(lambda: site.watch.trial is not None)
    state = json.loads((tmp_path / ".served.json").read_text())
    del state["entries"]["encode"]["candidate"]
    (tmp_path / "new").write_text(json.dumps(state))
    os.replace(tmp_path / "new", tmp_path / ".served.json")
    assert until(lambda: site.opened[0].closed)
    site.watch.close()
