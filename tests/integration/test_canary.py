"""A version on trial on the real server, under load: nothing is lost, and it gets its share, no more and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import builders.candidate
from builders.candidate import TrialOptions, TrialResult, drop_candidate, run_trial
from builders.comparison import Limits
from builders.control import ModelControl
from builders.settings import load_settings
from builders.state import Served, read_state
from builders.versions import promote
from tests.integration.conftest import PATIENT
from tests.integration.test_promote import KEY, OTHER, Site, Traffic, engine_vectors, near, traffic
from tests.tools.repositories import build_ungated, settings_file

SHARE = 0.2
LIMITS = Limits(slower=3.0, least=30)
#: Appended to a lane's model.py. The calls that only look whether a lane is there have texts of one token.
PLANTED = """

_whole_execute = TritonPythonModel.execute


def _planted_execute(self, requests):
    if any(pb_utils.get_input_tensor_by_name(r, "length").as_numpy().max() > 1 for r in requests):
        FAULT
    return _whole_execute(self, requests)


TritonPythonModel.execute = _planted_execute
"""
FAULTS = {"errors": "raise RuntimeError('planted')", "slow": "__import__('time').sleep(0.4)"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Version 1 served, version 2 (another fine-tune of the same shape) published; two buckets, to be quick."""
    pytest.importorskip("sre_embedding_model")
    folder = tmp_path_factory.mktemp("canary")
    small = {"buckets": [16, 64], "entry": {**PATIENT, "processes": 2}}
    settings = load_settings(settings_file(folder, "deploy.cpu.yaml", **small, model={"max_tokens": 64}))
    site = Site(folder, settings, build_ungated(settings).models)
    try:
        site.start()
        promote(site.repository, settings, 1, site.url, print, key=KEY)
        other = settings_file(folder, "deploy.cpu.yaml", **small, model={"source": OTHER, "max_tokens": 64})
        assert build_ungated(load_settings(other)).version == 2
        yield site
    finally:
        if site.server is not None:
            site.server.stop()


@pytest.fixture(scope="module")
def expected(site: Site) -> dict[int, np.ndarray]:
    """Each version's vectors of the texts, computed without a server."""
    return {version: engine_vectors(site.repository, version) for version in (1, 2)}


def versions_of(seen: Traffic, expected: dict[int, np.ndarray]) -> list[tuple[float, float, int]]:
    """When each request was sent and answered, and by which version; every one is of exactly one."""
    found = []
    for sent, got, number, vector in seen.answers:
        versions = [version for version in (1, 2) if near(vector, expected[version][number])]
        assert len(versions) == 1, (number, versions)
        found.append((sent, got, versions[0]))
    return found


def tried(site: Site, seconds: float, *, apply: bool = True, limits: Limits = LIMITS) -> TrialResult:
    assert site.server is not None
    options = TrialOptions(SHARE, seconds, 5.0, limits, texts=("Where is my order?", "a longer text " * 9))
    done = run_trial(
        site.repository, site.settings, 2, site.url, site.server.metrics_url, print, options, apply=apply, key=KEY
    )
    print(done)
    return done


@contextmanager
def planted(site: Site, fault: str) -> Iterator[None]:
    """Version 2's lanes with a fault."""
    files = [site.repository / lane / "2/model.py" for lane in ("encoder_16", "encoder_64")]
    texts = {file: file.read_text() for file in files}
    for file, text in texts.items():
        file.write_text(text + PLANTED.replace("FAULT", FAULTS[fault]))
    try:
        yield
    finally:
        for file, text in texts.items():
            file.write_text(text)


def configs(site: Site) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in site.repository.glob("*/config.pbtxt")}


@pytest.mark.parametrize("fault", ["errors", pytest.param("slow", marks=pytest.mark.slow)])
def test_bad_version_is_dropped_and_no_request_fails(site: Site, expected: dict[int, np.ndarray], fault: str) -> None:
    before = configs(site)
    with planted(site, fault), traffic(site.url) as seen:
        done = tried(site, 5)
    assert seen.errors == []
    assert done.verdict.kind == "worse"
    assert done.change is None
    if fault == "errors":
        # Every one of them was answered by version 1 in its place.
        assert {version for *_, version in versions_of(seen, expected)} == {1}
        assert done.counts.arms["candidate"].bad >= 10
        assert done.counts.arms["candidate"].answered == 0
    else:
        assert {version for *_, version in versions_of(seen, expected)} == {1, 2}
        assert "P50" in done.verdict.reasons[0]
    assert configs(site) == before
    with ModelControl(site.url, key=KEY) as control:
        assert control.index()["encoder_16"] == control.index()["encode"] == (1,)
    assert read_state(site.repository) == Served(served=1, lanes=(1,))


@pytest.mark.slow
def test_served_version_alone_answers_seconds_after_the_command_was_killed(
    site: Site, expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, traffic(site.url) as seen:
        # As after a kill: the lease is not taken back, the lanes stay.
        patch.setattr(builders.candidate, "LEASE_S", 4.0)
        patch.setattr(builders.candidate, "SETTLE_S", 0.0)
        patch.setattr(builders.candidate._Trial, "end", lambda self: False)
        patch.setattr(builders.candidate._Trial, "drop", lambda self: None)
        tried(site, 1, apply=False)
        state = read_state(site.repository)
        assert state is not None
        assert state.candidate is not None
        over = time.monotonic() + state.candidate.until - time.time()
        time.sleep(max(0.0, over - time.monotonic()) + 1.0)
    assert seen.errors == []
    answers = versions_of(seen, expected)
    assert {version for sent, _, version in answers if sent < over} == {1, 2}
    assert {version for sent, _, version in answers if sent > over} == {1}
    assert drop_candidate(site.repository, site.settings, site.url, print, key=KEY) == 2
    with ModelControl(site.url, key=KEY) as control:
        assert control.index()["encoder_16"] == (1,)


def test_version_gets_its_share_of_the_answers_and_is_promoted_without_a_lost_request(
    site: Site, expected: dict[int, np.ndarray]
) -> None:
    with traffic(site.url) as seen:
        # Two cores that others use too measure no times.
        done = tried(site, 7, limits=replace(LIMITS, slower=1000.0))
        time.sleep(0.5)
    assert seen.errors == []
    assert done.verdict.kind == "not worse"
    assert done.change is not None
    assert (done.change.served, done.change.previous, done.change.lanes_loaded) == (2, 1, False)
    answers = versions_of(seen, expected)
    first = next(got for _, got, version in answers if version == 2)
    # The trial's last seconds, when both processes have surely begun it; the promote comes behind them.
    during = [version for _, got, version in answers if first + 2 < got < first + 5.5]
    assert len(during) > 50
    # Four standard deviations.
    assert abs(during.count(2) / len(during) - SHARE) < 4 * (SHARE * (1 - SHARE) / len(during)) ** 0.5
    candidate, control = done.counts.arms["candidate"], done.counts.arms["control"]
    assert candidate.bad == control.bad == 0
    assert abs(candidate.answered - control.answered) < 4 * (candidate.answered + control.answered) ** 0.5
    assert 0 < done.counts.share < 2 * SHARE
    assert done.agreement is not None
    # Both answered: another fine-tune's vectors are others.
    assert done.agreement.worst < 0.99
    assert answers[-1][2] == 2
    assert read_state(site.repository) == Served(served=2, previous=1, lanes=(1, 2))
