"""The command behind `canary` without a server: lease, lanes, verdict, and what is left when something fails."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import builders.candidate
import builders.versions
from builders.agreement import request_ids
from builders.candidate import LEASE_S, TrialOptions, TrialResult, drop_candidate, run_trial
from builders.cli import app
from builders.comparison import Limits
from builders.errors import BuilderError, ControlError, LoadError, ManifestError, PromoteError
from builders.manifest import Machine
from builders.serving.entry.config import EntryConfig
from builders.serving.entry.trial import EDGES, place_of
from builders.settings import DeploySettings, load_settings
from builders.state import Candidate, Served, read_state, write_state
from builders.versions import promote, rollback
from clients.errors import ServerUnavailable
from tests.builders.test_publish import LENGTHS
from tests.builders.test_versions import FakeServer, publish_three, served_by_configs
from tests.tools.repositories import settings_file

NONE = Machine()
OPTIONS = TrialOptions(share=0.2, seconds=0.3, deadline_s=0.2, limits=Limits(least=50))
#: Of a trial that something else ends.
LONG = replace(OPTIONS, seconds=60.0)


class Server(FakeServer):
    """As it is for a promote, and with an entry that follows the lease and has requests."""

    def __init__(self, repository: Path) -> None:
        super().__init__(repository)
        self.follows, self.knows = True, True
        self.failing, self.seconds = 0, 0.01
        self.asked: list[str] = []
        self.leases: list[Candidate] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self._answered = 0

    def page(self, url: str) -> str:
        """The metrics: each look at them finds a hundred requests more of each arm while there is a trial."""
        assert url == "metrics"
        state = read_state(self.repository)
        lease = state.candidate if state else None
        if lease is not None and lease not in self.leases:
            self.leases.append(lease)
        running = lease is not None and self.follows and time.time() < lease.until
        if running:
            self._answered += 100
            self.meanwhile()
        own = 'model="encode",version="1"'
        lines = [f"nv_inference_request_success{{{own}}} {self._answered * 5}"]
        if self.knows:
            lines.append(f'encoder_lanes_candidate_version{{instance="0",{own}}} {lease.version if running else 0}')
        for arm, seconds, failed in (("candidate", self.seconds, self.failing), ("control", 0.01, 0)):
            labels = f'arm="{arm}",{own}'
            failed = failed * self._answered // 100
            lines.append(f'encoder_lanes_candidate_requests_total{{outcome="answered",{labels}}} {self._answered}')
            lines.append(f'encoder_lanes_candidate_requests_total{{outcome="failed",{labels}}} {failed}')
            for edge in (*(f"{edge:g}" for edge in EDGES[bisect_left(EDGES, seconds) :]), "+Inf"):
                lines.append(f'encoder_lanes_candidate_seconds_bucket{{le="{edge}",{labels}}} {self._answered}')
        return "\n".join(lines)

    def ask_entry(
        self, model: str, version: int, texts: dict[str, str], output: str, request_id: str = ""
    ) -> np.ndarray:
        self.asked.append(request_id)
        return super().ask_entry(model, version, texts, output) + (place_of(request_id) < 0.2 if request_id else 0)


@pytest.fixture
def settings(tmp_path: Path) -> DeploySettings:
    return load_settings(settings_file(tmp_path, "deploy.cpu.yaml"))


@pytest.fixture
def repository(settings: DeploySettings, tmp_path: Path) -> Path:
    return publish_three(settings, tmp_path)


@pytest.fixture
def server(repository: Path, settings: DeploySettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    fake = Server(repository)
    for module in (builders.versions, builders.candidate):
        monkeypatch.setattr(module, "ModelControl", lambda url, key, tls: fake)
    monkeypatch.setattr(builders.candidate, "fetch_metrics", fake.page)
    for name, value in {"SETTLE_S": 0.0, "RENEW_S": 0.05, "BEGIN_S": 0.5, "END_S": 0.5, "_POLL_S": 0.01}.items():
        monkeypatch.setattr(builders.candidate, name, value)
    # The configurations of version 1 alone, and a server that has them.
    promote(repository, settings, 2, None, print, machine=NONE)
    promote(repository, settings, 1, None, print, machine=NONE, keep_old=False)
    write_state(repository, Served(served=1, lanes=(1,)))
    fake.start()
    return fake


@pytest.fixture
def run(repository: Path, settings: DeploySettings, server: Server) -> Callable[..., TrialResult]:
    def start(version: int = 2, options: TrialOptions = OPTIONS, **more: Any) -> TrialResult:
        return run_trial(repository, settings, version, "server", "metrics", print, options, machine=NONE, **more)

    return start


@pytest.fixture
def configs(repository: Path) -> Callable[[], dict[Path, bytes]]:
    return lambda: {path: path.read_bytes() for path in repository.glob("*/config.pbtxt")}


Run = Callable[..., TrialResult]
Configs = Callable[[], dict[Path, bytes]]


def test_candidate_that_is_not_worse_is_promoted_and_the_entry_loaded_for_that_alone(
    repository: Path, server: Server, run: Run
) -> None:
    done = run(apply=True)
    assert done.verdict.kind == "not worse"
    assert (done.candidate, done.served) == (2, 1)
    assert done.change is not None
    assert not done.change.lanes_loaded
    assert server.calls == ["load encoder_16", "load encoder_32", "load encoder_64", "load encode"]
    assert server.loaded == {f"encoder_{length}": (1, 2) for length in LENGTHS} | {"encode": (2,)}
    assert read_state(repository) == Served(served=2, previous=1, lanes=(1, 2))
    assert done.counts.arms["candidate"].answered > 100


@pytest.mark.parametrize("apply", [False, True])
def test_everything_as_before_when_the_candidate_is_dropped(
    repository: Path, server: Server, run: Run, configs: Configs, apply: bool
) -> None:
    loaded, before = server.index(), configs()
    server.seconds = 0.05 if apply else 0.01
    done = run(apply=apply)
    assert done.verdict.kind == ("worse" if apply else "not worse")
    assert done.change is None
    assert "load encode" not in server.calls
    assert server.index() == loaded
    assert configs() == before
    assert read_state(repository) == Served(served=1, lanes=(1,))


def test_lease_is_renewed_and_holds_what_the_entry_needs(server: Server, run: Run) -> None:
    run(3)
    assert len(server.leases) > 3
    ends = [lease.until for lease in server.leases]
    assert ends == sorted(ends)
    assert ends[-1] <= time.time() + LEASE_S
    lease = server.leases[0]
    assert (lease.version, lease.share, lease.deadline_s) == (3, 0.2, 0.2)
    config = EntryConfig.from_parameters(lease.entry, 2)
    # Its own buckets, not those of the served version.
    assert [(route.length, route.model) for route in config.buckets] == [(16, "encoder_16"), (128, "encoder_128")]


def test_trial_without_hope_ended_early(server: Server, run: Run) -> None:
    server.failing = 50
    began = time.monotonic()
    done = run(options=LONG, apply=True)
    assert time.monotonic() - began < 10
    assert done.verdict.kind == "worse"
    assert done.change is None


def test_both_versions_asked_the_same_texts_by_the_ids_of_their_arms(server: Server, run: Run) -> None:
    server.vector = np.ones((1, 4), dtype=np.float32)
    done = run(options=replace(OPTIONS, seconds=0.1, limits=Limits(), texts=("one", "two", "three")))
    asked = [place_of(name) for name in server.asked if name]
    assert [place < 0.2 for place in asked] == [True, False] * 3
    assert all(place < 0.4 for place in asked)
    assert done.agreement is not None
    assert done.agreement.texts == 3
    assert done.agreement.worst == pytest.approx(1.0)  # (1, 1, 1, 1) and (2, 2, 2, 2)
    assert len(set(request_ids("control", 0.001, "x"))) == 8


def test_lanes_of_before_a_promote_stay_loaded(
    repository: Path, settings: DeploySettings, server: Server, run: Run
) -> None:
    promote(repository, settings, 2, "server", print, machine=NONE)
    promote(repository, settings, 1, "server", print, machine=NONE)
    run(3)
    assert server.loaded == {f"encoder_{length}": (1, 2) for length in LENGTHS} | {"encode": (1,)}
    assert read_state(repository) == Served(served=1, previous=2, lanes=(1, 2))


@pytest.mark.parametrize("step", range(3))
def test_everything_put_back_when_a_lane_cannot_be_loaded(
    repository: Path, server: Server, run: Run, configs: Configs, step: int
) -> None:
    loaded, before = server.index(), configs()
    server.fail_at = step
    with pytest.raises(LoadError, match="planted"):
        run()
    assert (server.index(), configs()) == (loaded, before)
    assert read_state(repository) == Served(served=1, lanes=(1,))
    assert server.leases == []


def test_candidate_dropped_when_the_promote_fails(repository: Path, server: Server, run: Run, configs: Configs) -> None:
    loaded, before = server.index(), configs()
    server.fail_at = 3
    with pytest.raises(LoadError, match="encode could not be loaded: planted"):
        run(apply=True)
    assert (server.index(), configs()) == (loaded, before)
    assert read_state(repository) == Served(served=1, lanes=(1,))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ServerUnavailable("gone")], ids=["Ctrl-C", "no metrics"])
def test_candidate_dropped_when_the_command_is_interrupted_or_sees_no_metrics_any_more(
    repository: Path, server: Server, run: Run, configs: Configs, error: BaseException
) -> None:
    loaded, before = server.index(), configs()
    looks = iter(range(100))

    def meanwhile() -> None:
        if next(looks) == 3:
            raise error

    server.meanwhile = meanwhile
    with pytest.raises((KeyboardInterrupt, ControlError)):
        run(options=LONG)
    assert (server.index(), configs()) == (loaded, before)
    assert read_state(repository) == Served(served=1, lanes=(1,))


def test_trial_gives_way_when_somebody_changes_what_is_served(
    repository: Path, settings: DeploySettings, server: Server, run: Run
) -> None:
    looks = iter(range(100))

    def meanwhile() -> None:
        if next(looks) == 3:
            promote(repository, settings, 3, "server", print, machine=NONE)

    server.meanwhile = meanwhile
    with pytest.raises(PromoteError, match="ended by somebody else"):
        run(options=LONG, apply=True)
    assert server.loaded["encode"] == (3,)
    assert served_by_configs(repository) == {name: list(found) for name, found in server.loaded.items()}
    assert read_state(repository) == Served(served=3, previous=1, lanes=(1, 3))


def test_trial_gives_way_to_a_rollback_and_leaves_no_lanes(
    repository: Path, settings: DeploySettings, server: Server, run: Run
) -> None:
    promote(repository, settings, 2, "server", print, machine=NONE)
    promote(repository, settings, 1, "server", print, machine=NONE)
    looks = iter(range(100))

    def meanwhile() -> None:
        if next(looks) == 3:
            rollback(repository, settings, "server", print, machine=NONE)

    server.meanwhile = meanwhile
    with pytest.raises(PromoteError, match="ended by somebody else"):
        run(3, LONG)
    assert server.loaded == {f"encoder_{length}": (1, 2) for length in LENGTHS} | {"encode": (2,)}
    assert read_state(repository) == Served(served=2, previous=1, lanes=(1, 2))


def test_lanes_of_the_candidate_are_dropped_when_the_state_file_has_vanished(
    repository: Path, server: Server, run: Run, configs: Configs
) -> None:
    loaded, before = server.index(), configs()
    looks = iter(range(100))

    def meanwhile() -> None:
        if next(looks) == 3:
            (repository / ".served.json").unlink()

    server.meanwhile = meanwhile
    with pytest.raises(PromoteError, match="ended by somebody else"):
        run(3, LONG)
    assert (server.index(), configs()) == (loaded, before)
    assert read_state(repository) is None


def test_what_a_killed_command_left_is_dropped_with_share_0(
    repository: Path,
    settings: DeploySettings,
    server: Server,
    run: Run,
    configs: Configs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, before = server.index(), configs()
    with monkeypatch.context() as patch:
        # As after a kill: nothing is tidied.
        patch.setattr(builders.candidate._Trial, "end", lambda self: False)
        patch.setattr(builders.candidate._Trial, "drop", lambda self: None)
        run()
    state = read_state(repository)
    assert state is not None
    assert state.candidate is not None
    with pytest.raises(PromoteError, match=r"version 2 is on trial already; to do: .*--share 0"):
        run()
    assert drop_candidate(repository, settings, "server", print) == 2
    assert (server.index(), configs()) == (loaded, before)
    assert read_state(repository) == Served(served=1, lanes=(1,))
    assert drop_candidate(repository, settings, "server", print) is None


def test_trial_refused_with_what_to_do(
    repository: Path, server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = server.index()
    with pytest.raises(PromoteError, match="version 1 is served already"):
        run(1)
    with pytest.raises(ManifestError, match="no such version"):
        run(9)
    with pytest.raises(BuilderError, match=r"share.*0\.6; limit: more than 0, at most 0\.5"):
        run(options=TrialOptions(share=0.6))
    server.follows = False
    with pytest.raises(PromoteError, match=r"not every process .* version 2: \(0,\)"):
        run()
    server.knows = False
    with pytest.raises(PromoteError, match="built before there were trials"):
        run()
    assert server.index() == loaded
    server.calls.clear()

    def none(url: str) -> str:
        raise ServerUnavailable("connection refused", url=url)

    monkeypatch.setattr(builders.candidate, "fetch_metrics", none)
    with pytest.raises(ControlError, match=r"metrics cannot be read.*--metrics-url"):
        run()
    assert server.calls == []


def test_command_tells_the_comparison_and_its_exit_code_the_verdict(
    repository: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ["--config", str(repository.parent / "deploy.test.yaml"), "--metrics-url", "metrics", "--seconds", "1"]
    config += ["--deadline", "0.2"]
    monkeypatch.setattr(builders.versions, "this_machine", lambda: NONE)
    command = CliRunner()
    server.seconds = 0.05
    worse = command.invoke(app, ["canary", "2", "--apply", *config])
    assert worse.exit_code == 1
    assert "P50 is" in worse.output
    server.seconds = 0.01
    held = command.invoke(app, ["canary", "2", "--apply", *config])
    assert held.exit_code == 0
    assert "2, candidate" in held.output
    state = read_state(repository)
    assert state is not None
    assert state.served == 2
    ended = command.invoke(app, ["canary", "2", "--share", "0", *config])
    assert ended.exit_code == 0
