"""Promote, rollback, list: which published version answers, changed on a running server without a lost request.

Triton runs in explicit model control mode. Lanes of the old and the new version are loaded side by side and warmed,
then `encode` changes over: Triton makes the new version ready before it retires the old one, whose requests in flight
are answered by their own lanes. Every request is answered by one version, because the entry pins its own in each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from builders.access import ClientTls
from builders.change import VersionChange
from builders.control import ModelControl
from builders.errors import ManifestError, PromoteError
from builders.lock import repository_lock
from builders.machine import this_machine
from builders.manifest import (
    Machine,
    Manifest,
    check_compatible,
    check_complete,
    check_fits,
    published_versions,
    read_manifest,
)
from builders.names import make_command, of_model
from builders.publish import sweep
from builders.settings import DeploySettings
from builders.state import Candidate, Served, read_state, served_now, write_state

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """What a promote or a rollback did.

    Attributes:
        served: the version that answers now.
        previous: the one that answered before; None when nothing did.
        seconds: all of it.
        switch_seconds: from the entry's load to its first verified answer.
        lanes_loaded: whether lanes had to be loaded; without that, the change takes seconds.
    """

    served: int
    previous: int | None
    seconds: float
    switch_seconds: float
    lanes_loaded: bool


@dataclass(frozen=True)
class VersionRow:
    """A published version, for people.

    Attributes:
        version: its number.
        manifest: what is known of it; None where that cannot be read.
        problem: why it cannot be served; empty when it can, as far as its files say.
        served: it answers.
        previous: `rollback` goes back to it.
        loaded: its lanes are loaded.
        trial: it is on trial beside the served one, or its command died; else None.
    """

    version: int
    manifest: Manifest | None
    problem: str
    served: bool
    previous: bool
    loaded: bool
    trial: Candidate | None = None

    @property
    def on_trial(self) -> bool:
        """Whether the lease of its trial runs."""
        return self.trial is not None and self.trial.until > time.time()


def list_versions(repository: Path, name: str = "") -> list[VersionRow]:
    """Every published version of the model `name`, rising.

    Raises:
        StateError: the state file cannot be used.
    """
    state = served_now(repository, name)
    rows = []
    for version in published_versions(repository, name):
        manifest, problem = None, ""
        try:
            manifest = read_manifest(repository, version, name)
            check_complete(repository, version, manifest)
        except ManifestError as error:
            problem = str(error)
        rows.append(
            VersionRow(
                version=version,
                manifest=manifest,
                problem=problem,
                served=state is not None and state.served == version,
                previous=state is not None and state.previous == version,
                loaded=state is not None and version in state.lanes,
                trial=state.candidate if state and state.candidate and state.candidate.version == version else None,
            )
        )
    return rows


def promote(
    repository: Path,
    settings: DeploySettings,
    version: int,
    url: str | None,
    progress: Progress,
    *,
    key: tuple[str, str] | None = None,
    tls: ClientTls | None = None,
    keep_old: bool = True,
    machine: Machine | None = None,
) -> Change:
    """Let `version` answer instead of the served one; other models of the repository are left as they are.

    Args:
        repository: the model repository that the server at `url` serves.
        settings: the deployment; configurations are rendered from it and from the versions' manifests.
        version: a published version.
        url: gRPC address of the server; None changes only what the next start serves, and leaves the old version's
            lanes out where they do not fit this machine.
        progress: told one line per step.
        key: name and value that the server's model control API asks for.
        tls: what a server with TLS is checked against.
        keep_old: keep the old version's lanes loaded, for a rollback within seconds; they take memory.
        machine: what a plan must fit; this machine by default.

    Raises:
        BuilderError: what was served is served on: ManifestError (missing, damaged, another model, made for another
            machine), ControlError (the server), PublishError (another build or promote runs).
    """
    began, name = time.monotonic(), settings.name
    with repository_lock(repository, name=name):
        sweep(repository, name)
        new = checked_manifest(settings, repository, version, machine)
        with ModelControl(url, key=key, tls=tls) if url else nullcontext() as control:
            state, old = read_state(repository, name), answering_version(settings, repository, control, progress)
            if old == version:
                progress(f"version {version} is served already")
                kept = _already(state, version, keep_old=keep_old)
                if not keep_old:
                    step = VersionChange(repository, settings, control, progress, {version: new})
                    step.keep_only(version)
                    step.drop_unused()
                if kept != state:
                    write_state(repository, kept, name)
                return Change(version, kept.previous, time.monotonic() - began, 0.0, False)
            manifests = {version: new}
            if old is not None:
                manifests[old] = read_manifest(repository, old, name)
                check_compatible(manifests[old], new)
            # Where nothing runs nobody needs the old lanes until then: one configuration need not fit both.
            if control is None and not (keep_old and old and _loads_here(repository, old, settings, machine, progress)):
                manifests = {version: new}
            step = VersionChange(repository, settings, control, progress, manifests)
            with step.put_back_on_failure():
                loaded = step.load_lanes()
                switch = step.switch(version)
                write_state(repository, Served(served=version, previous=old, lanes=tuple(sorted(manifests))), name)
            step.drop_ensembles(version)
            if not keep_old:
                step.keep_only(version)
                write_state(repository, Served(served=version, previous=old, lanes=(version,)), name)
            step.drop_unused()
    return Change(version, old, time.monotonic() - began, switch, loaded)


def rollback(
    repository: Path,
    settings: DeploySettings,
    url: str | None,
    progress: Progress,
    *,
    key: tuple[str, str] | None = None,
    tls: ClientTls | None = None,
    machine: Machine | None = None,
) -> Change:
    """Let the version answer again that answered before the last promote.

    Where its lanes are still loaded, `encode` alone is loaded, which takes seconds; else the lanes first. The lanes'
    configurations are not rendered again, whatever the settings say by now. Without a server the lanes of the version
    that it goes back from are left out where they cannot be loaded here, as after the way back to an older TensorRT.

    Raises:
        PromoteError: there is no version to go back to.
        BuilderError: as `promote`.
    """
    began, name = time.monotonic(), settings.name
    with repository_lock(repository, name=name):
        state = read_state(repository, name)
        if state is None or state.previous is None:
            there = ", ".join(map(str, published_versions(repository, name))) or "none"
            raise PromoteError(
                f"there is no version{of_model(name)} to go back to", limit=f"published: {there}",
                remedy=make_command("promote VERSION=N", name),
            )  # fmt: skip
        target = state.previous
        with ModelControl(url, key=key, tls=tls) if url else nullcontext() as control:
            old = answering_version(settings, repository, control, progress) or state.served
            manifests = {target: read_manifest(repository, target, name)}
            step = VersionChange(repository, settings, control, progress, manifests)
            ready, loaded, kept = control is not None and step.lanes_ready(target), False, {old, target}
            if not ready:
                checked_manifest(settings, repository, target, machine)
                if control is None and not _loads_here(repository, old, settings, machine, progress):
                    kept = {target}
                else:
                    # While they load, those that answer now must stay. Else nothing is asked of a version that fails.
                    manifests[old] = read_manifest(repository, old, name)
            with step.put_back_on_failure():
                if not ready:
                    if control:
                        progress(f"the lanes of version {target} are not loaded any more")
                    loaded = step.load_lanes()
                switch = step.switch(target)
                previous = old if old != target else state.served
                write_state(repository, Served(served=target, previous=previous, lanes=tuple(sorted(kept))), name)
            step.drop_ensembles(target)
            if old not in kept:
                step.drop_unused()
    return Change(target, old, time.monotonic() - began, switch, loaded)


def record_start(repository: Path, name: str = "") -> None:
    """Write down what a server that was just started serves, so that a later build does not change it at a restart."""
    if read_state(repository, name) is None:
        with repository_lock(repository, name=name):
            found = served_now(repository, name)
            if found is not None:
                write_state(repository, found, name)


def check_served(
    repository: Path, machine: Machine | None = None, *, name: str = "", whole: Collection[int] = ()
) -> None:
    """Make sure, before a start, that what the model `name` serves is as it was published and fits this machine.

    Args:
        repository: the model repository.
        machine: what a plan must fit; this machine by default.
        name: of the model.
        whole: versions whose files were compared with their hashes a moment ago.

    Raises:
        ManifestError: naming the file that differs; with both fingerprints where a plan does not fit.
        StateError: the state file cannot be used.
    """
    state = served_now(repository, name)
    for version in state.lanes if state else ():
        manifest = read_manifest(repository, version, name)
        try:
            check_complete(repository, version, manifest, hashes=version not in whole)
        except ManifestError as error:
            # Building again makes another version, and this one is what the state file says.
            again = make_command("build-engines", name)
            remedy = f"{again}, then python -m builders promote N --offline with the version N that it tells"
            raise ManifestError(error.what, remedy=remedy) from None
        check_fits(manifest, machine or this_machine())


def _already(state: Served | None, version: int, *, keep_old: bool) -> Served:
    """What is written down where `version` answers already, perhaps behind the state file's back."""
    if state is None:
        return Served(served=version, lanes=(version,))
    previous = state.previous if state.served == version else state.served
    lanes = sorted({*state.lanes, version}) if keep_old else [version]
    return Served(served=version, previous=previous, lanes=tuple(lanes))


def _loads_here(
    repository: Path, version: int, settings: DeploySettings, machine: Machine | None, progress: Progress
) -> bool:
    """Whether the next start can load the lanes of the version that answered so far; told where it cannot.

    A plan is of one TensorRT and one kind of GPU: beside the other version it would keep the server from its start.
    """
    try:
        check_fits(read_manifest(repository, version, settings.name), machine or this_machine())
    except ManifestError as error:
        progress(f"the lanes of version {version} are left out of the next start: {error}")
        return False
    return True


def checked_manifest(settings: DeploySettings, repository: Path, version: int, machine: Machine | None) -> Manifest:
    """The manifest of a version that may be loaded: complete, unchanged, and made for this machine."""
    manifest = read_manifest(repository, version, settings.name)
    check_fits(manifest, machine or this_machine())
    check_complete(repository, version, manifest, hashes=True)
    return manifest


def answering_version(
    settings: DeploySettings, repository: Path, control: ModelControl | None, progress: Progress
) -> int | None:
    """What answers now: the server knows better than the state file."""
    found = served_now(repository, settings.name)
    state = found.served if found and read_state(repository, settings.name) else None
    if control is None:
        return state
    ready = control.ready_versions(settings.entry_model)
    if not ready:
        return None
    if state is not None and state not in ready:
        progress(f"the server serves version {ready[-1]}, not {state} as the state file says")
        return ready[-1]
    return state or ready[-1]
