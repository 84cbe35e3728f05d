"""A version on trial: some of a running server's requests are answered by it, then it is promoted or dropped.

The lanes of the candidate are loaded beside the served ones, as for a promote. A lease in the state file, renewed every
few seconds, lets the entry give it a share of the requests (`builders/serving/entry/trial.py`); the entry itself is not
loaded anew. Whatever ends this process ends the trial with the lease, and the served version answers everything again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from builders.access import ClientTls
from builders.agreement import Agreement, ask_both
from builders.change import VersionChange
from builders.comparison import Limits, TrialCounts, Verdict, is_hopeless, judge, read_counts
from builders.control import ModelControl
from builders.entry_parameters import entry_parameters
from builders.errors import BuilderError, ControlError, PromoteError, PublishError
from builders.lock import repository_lock
from builders.manifest import Machine, Manifest, check_compatible, read_manifest
from builders.names import make_command
from builders.publish import sweep
from builders.render import facts_of_manifest
from builders.settings import DeploySettings
from builders.state import Candidate, Served, read_state, served_now, write_state
from builders.versions import Change, answering_version, checked_manifest, promote
from clients import EncoderError
from clients.status import fetch_metrics

Progress = Callable[[str], None]

#: How long a lease runs, and between two renewals; seconds.
LEASE_S, RENEW_S = 15.0, 3.0
#: Longest wait for the entry's processes to begin a trial: each asks every lane first; seconds.
BEGIN_S = 60.0
#: Longest wait for them to end it; seconds. Then the lease has ended, too.
END_S = LEASE_S
#: Their counters are told once a second; this long after the last request everything is.
SETTLE_S = 2.5
_POLL_S = 0.2


@dataclass(frozen=True)
class TrialOptions:
    """What a trial is like.

    Attributes:
        share: of the requests that the candidate answers; as many are its control's.
        seconds: how long.
        deadline_s: longest that the candidate may take, seconds; then the served version answers.
        limits: what it must hold to.
        texts: asked of both versions and compared; none: nothing is compared.
    """

    share: float = 0.05
    seconds: float = 60.0
    deadline_s: float = 5.0
    limits: Limits = field(default_factory=Limits)
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrialResult:
    """How a trial went.

    Attributes:
        candidate: the version that was tried.
        served: the version that it was compared with.
        counts: of both.
        verdict: whether it may be promoted.
        agreement: of the answers; None where no texts were asked.
        change: the promote; None where the candidate was dropped.
    """

    candidate: int
    served: int
    counts: TrialCounts
    verdict: Verdict
    agreement: Agreement | None
    change: Change | None


@dataclass
class _Trial:
    """A trial under way."""

    repository: Path
    settings: DeploySettings
    control: ModelControl
    metrics_url: str
    progress: Progress
    options: TrialOptions
    version: int
    served: int
    manifest: Manifest
    renewed: float = 0.0

    def lease(self) -> Candidate:
        """A lease from now on."""
        facts = facts_of_manifest(self.settings, self.manifest)
        return Candidate(
            version=self.version,
            share=self.options.share,
            until=time.time() + LEASE_S,
            deadline_s=self.options.deadline_s,
            entry=json.loads(entry_parameters(self.settings, facts)["entry"]),
        )

    def state(self) -> Served | None:
        """What is written down, if it is still this trial; under the lock."""
        state = read_state(self.repository, self.settings.name)
        if state is None or state.served != self.served or state.candidate is None:
            return None
        return state if state.candidate.version == self.version else None

    def renew(self) -> None:
        """Extend the lease.

        Raises:
            PromoteError: somebody promoted, rolled back or began another trial.
        """
        try:
            with repository_lock(self.repository, wait_s=1.0, name=self.settings.name):
                state = self.state()
                if state is not None:
                    lease = self.lease()
                    write_state(self.repository, state.model_copy(update={"candidate": lease}), self.settings.name)
        except PublishError:
            # A build publishes, or somebody promotes: the next renewal finds out, or the lease ends.
            return
        if state is None:
            raise PromoteError(
                f"the trial of version {self.version} was ended by somebody else: what is served was changed meanwhile",
                remedy=make_command("versions", self.settings.name),
            )

    def renew_when_due(self) -> None:
        """Extend the lease if that is some time ago; raises as `renew`."""
        if time.monotonic() - self.renewed > RENEW_S:
            self.renew()
            self.renewed = time.monotonic()

    def counts(self) -> TrialCounts:
        """What the entry tells now.

        Raises:
            ControlError: the metrics cannot be read.
        """
        return read_counts(_page(self.metrics_url), self.settings.entry_model, self.served)

    def begin(self) -> TrialCounts:
        """Wait until every process of the entry has begun the trial; what was counted before it.

        Raises:
            PromoteError: they do not.
        """
        before, deadline = self.counts(), time.monotonic() + BEGIN_S
        if not before.on_trial:
            raise PromoteError(
                f"the served version {self.served} cannot try another one: it was built before there were trials",
                limit="no encoder_lanes_candidate_version in its metrics",
                remedy=make_command(f"promote VERSION={self.version}", self.settings.name),
            )
        while any(found != self.version for found in self.counts().on_trial):
            if time.monotonic() > deadline:
                raise PromoteError(
                    f"not every process of the entry has begun the trial of version {self.version}",
                    value=self.counts().on_trial, limit=f"{BEGIN_S:g} s",
                    remedy="see the server's log; that it serves this repository, and that its clock is this one's",
                )  # fmt: skip
            self.renew_when_due()
            time.sleep(_POLL_S)
        return before

    def watch(self, before: TrialCounts) -> TrialCounts:
        """Renew and look until the time is over or the candidate is hopeless; what both did."""
        began = told = time.monotonic()
        while (now := time.monotonic()) - began < self.options.seconds:
            self.renew()
            counts = self.counts().since(before)
            if is_hopeless(counts, self.options.limits):
                self.progress("the trial is ended early: the candidate fails too often")
                break
            if now - told >= 10:
                told = now
                arm = counts.arms["candidate"]
                self.progress(f"  {now - began:.0f} s: {arm.answered} answers by version {self.version}, {arm.bad} bad")
            time.sleep(min(RENEW_S, max(0.0, began + self.options.seconds - time.monotonic())))
        return counts

    def end(self) -> bool:
        """Take the lease back and wait until no process tries the candidate; whether it was still this trial."""
        with repository_lock(self.repository, name=self.settings.name):
            state = self.state()
            if state is not None:
                write_state(self.repository, state.model_copy(update={"candidate": None}), self.settings.name)
        wait_for_end(self.counts, self.version)
        return state is not None

    def drop(self) -> None:
        """Give the memory of the candidate's lanes back."""
        with repository_lock(self.repository, name=self.settings.name):
            state = read_state(self.repository, self.settings.name)
            # Not what was before the trial: that may hold lanes of a command that died, and lack another's. Without a
            # state file (somebody removed it) the version that the entry was left with is all that is sure.
            lanes, other = ({*state.lanes}, state.candidate) if state is not None else ({self.served}, None)
            if other is not None and other.version != self.version:
                lanes.add(other.version)
            _load_only(self.repository, self.settings, self.control, self.progress, sorted(lanes))


def run_trial(
    repository: Path,
    settings: DeploySettings,
    version: int,
    url: str,
    metrics_url: str,
    progress: Progress,
    options: TrialOptions,
    *,
    apply: bool = False,
    key: tuple[str, str] | None = None,
    tls: ClientTls | None = None,
    machine: Machine | None = None,
) -> TrialResult:
    """Let `version` answer a share of the requests for a while, and compare it with the served one.

    Args:
        repository: the model repository that the server at `url` serves.
        settings: the deployment.
        version: a published version.
        url: gRPC address of the server.
        metrics_url: its metrics page.
        progress: told one line per step.
        options: share, time, limits.
        apply: promote it when it is not worse; without, it is dropped in any case.
        key: name and value that the server's model control API asks for.
        tls: what a server with TLS is checked against.
        machine: what a plan must fit; this machine by default.

    Raises:
        BuilderError: what was served is served on.
    """
    _page(metrics_url)  # before anything is loaded
    with ModelControl(url, key=key, tls=tls) as control:
        trial = _prepared(repository, settings, version, metrics_url, progress, options, control, machine)
        with _dropped_on_failure(trial):
            before = trial.begin()
            progress(f"version {version} answers {options.share:.1%} of the requests for {options.seconds:g} s")
            agreement = None
            if options.texts:
                keep_on = trial.renew_when_due
                agreement = ask_both(control, trial.manifest, trial.served, options.share, options.texts, keep_on)
            trial.watch(before)
            ours = trial.end()
            # What is under way is answered, or late, and the last counters are told.
            time.sleep(options.deadline_s + SETTLE_S)
            counts = trial.counts().since(before)
            verdict, change = judge(counts, options.limits), None
            if apply and verdict.kind == "not worse" and ours:
                change = promote(repository, settings, version, url, progress, key=key, tls=tls, machine=machine)
        if change is None:
            trial.drop()
    return TrialResult(version, trial.served, counts, verdict, agreement, change)


def drop_candidate(
    repository: Path,
    settings: DeploySettings,
    url: str,
    progress: Progress,
    *,
    key: tuple[str, str] | None = None,
    tls: ClientTls | None = None,
) -> int | None:
    """End whatever trial there is, and unload the lanes that a command left which died; the version it was of, or None.

    Raises:
        BuilderError: as `promote`.
    """
    name = settings.name
    with repository_lock(repository, name=name), ModelControl(url, key=key, tls=tls) as control:
        state = read_state(repository, name)
        if state is None:
            return None
        if state.candidate is not None:
            write_state(repository, state.model_copy(update={"candidate": None}), name)
        # Also without a trial: a rollback may have ended it and left its lanes.
        _load_only(repository, settings, control, progress, state.lanes)
    return state.candidate.version if state.candidate is not None else None


def _load_only(
    repository: Path, settings: DeploySettings, control: ModelControl, progress: Progress, versions: Sequence[int]
) -> None:
    """Let the server have the lanes of these versions and no others; under the lock."""
    manifests = {version: read_manifest(repository, version, settings.name) for version in versions}
    step = VersionChange(repository, settings, control, progress, manifests)
    with step.put_back_on_failure():
        step.load_lanes()
    step.drop_unused()


def wait_for_end(counts: Callable[[], TrialCounts], version: int) -> None:
    """Wait until no process of the entry tries `version`; `END_S` at most, when its lease has ended by itself."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            if version not in counts().on_trial:
                return
        except ControlError:
            pass
        time.sleep(_POLL_S)


def _page(metrics_url: str) -> str:
    try:
        return fetch_metrics(metrics_url)
    except EncoderError as error:
        raise ControlError(f"the server's metrics cannot be read: {error}", remedy="correct --metrics-url") from None


def _prepared(
    repository: Path,
    settings: DeploySettings,
    version: int,
    metrics_url: str,
    progress: Progress,
    options: TrialOptions,
    control: ModelControl,
    machine: Machine | None,
) -> _Trial:
    """Check both versions, load the candidate's lanes, write the first lease."""
    name = settings.name
    if not 0 < options.share <= 0.5:
        raise BuilderError(
            "the share of a candidate cannot be", value=options.share, limit="more than 0, at most 0.5",
            remedy="correct --share; 0 ends a trial",
        )  # fmt: skip
    with repository_lock(repository, name=name):
        sweep(repository, name)
        new = checked_manifest(settings, repository, version, machine)
        state, served = served_now(repository, name), answering_version(settings, repository, control, progress)
        if served is None or state is None:
            raise PromoteError(
                "nothing is served to try it beside", remedy=make_command(f"promote VERSION={version}", name)
            )
        if served == version:
            raise PromoteError(f"version {version} is served already", remedy=make_command("versions", name))
        if state.candidate is not None and state.candidate.until > time.time():
            raise PromoteError(
                f"version {state.candidate.version} is on trial already",
                remedy=f"wait for it, or end it: python -m builders canary {state.candidate.version} --share 0",
            )
        old = read_manifest(repository, served, name)
        check_compatible(old, new)
        for line in _notices(old, new):
            progress(line)
        kept = {lane: read_manifest(repository, lane, name) for lane in state.lanes}
        step = VersionChange(repository, settings, control, progress, {**kept, served: old, version: new})
        trial = _Trial(repository, settings, control, metrics_url, progress, options, version, served, new)
        with step.put_back_on_failure():
            step.load_lanes()
            lanes = tuple(sorted({*kept, served}))
            previous = state.previous if state.served == served else state.served
            lease = trial.lease()
            write_state(repository, Served(served=served, previous=previous, lanes=lanes, candidate=lease), name)
    return trial


def _notices(old: Manifest, new: Manifest) -> Iterator[str]:
    if old.task == "embedding" and old.model_sha256 != new.model_sha256:
        yield (
            "the candidate is of another model: during the trial vectors of both leave the server, and those must not "
            "be kept beside each other"
        )
    if old.serving_sha256 != new.serving_sha256:
        yield "the entry's own code differs between the two: it is not part of the trial, which has the served one's"


@contextmanager
def _dropped_on_failure(trial: _Trial) -> Iterator[None]:
    """On any failure, Ctrl-C too, the served version is in charge alone and the candidate's lanes are unloaded."""
    try:
        yield
    except BaseException as error:
        trial.progress("the trial is ended, and the candidate dropped")
        for what in (trial.end, trial.drop):
            try:
                what()
            except (BuilderError, OSError) as problem:
                error.add_note(str(problem))
                trial.progress(str(problem))
        raise
