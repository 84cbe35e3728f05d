"""From settings to a published version: source, export, fuse, precision, gate, compile, publish, report.

A step that fails ends the build before anything is published.
"""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders.bucket import BucketPlan
from builders.engine import Engines, make_engines, target_of
from builders.errors import ExportError, PublishError
from builders.graph import Recipe, recipe_for
from builders.lock import repository_lock
from builders.manifest import Manifest, Output, built_buckets
from builders.publish import SERVING, VersionParts, find_version, publish_version, sweep
from builders.render import bucket_plan, render_repository, write_configs
from builders.settings import DeploySettings
from builders.source import EncoderSource, open_source
from builders.state import served_now

Progress = Callable[[str], None]

_HERE = Path(__file__).parent
#: What decides how the graph looks; a change in one of them makes another graph.
GRAPH_MODULES = (
    *(_HERE / name for name in ("encoder.py", "export.py", "graph.py", "precision.py", "tiling.py")),
    _HERE / "tokenizer_files.py",
    *sorted((_HERE / "fuse").glob("*.py")),
    *sorted((_HERE / "tensorrt").glob("*.py")),
)


@dataclass(frozen=True)
class BuildOptions:
    """What the command line adds to the settings."""

    only: tuple[str, ...] = ()
    """Fusion steps to run alone."""
    skip: tuple[str, ...] = ()
    """Fusion steps to leave out."""
    onnx: Path | None = None
    """An ONNX graph with the lanes' contract that enters at fuse, instead of an export."""
    data: Path | None = None
    """The user's own texts for the task metric."""
    gate: bool = True
    """Run the accuracy gate. Off for tests of other things alone: the version then has no accuracy table."""


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        models: names to load, lanes first, the entry last.
        version: the version that was published, or found up to date.
        served: the version that the configurations serve; another one until `version` is promoted.
        built: False when the version was up to date and nothing was written.
        report: folder of report.json and report.html; None when nothing was built.
    """

    repository: Path
    models: tuple[str, ...]
    version: int
    plan: BucketPlan
    source: EncoderSource
    built: bool
    served: int
    report: Path | None = None


def build(
    settings: DeploySettings, cache: Path, progress: Progress, options: BuildOptions | None = None
) -> BuildResult:
    """Build and publish a new version, or find one that is up to date; what is served stays as it is.

    A version with the same fingerprint is reused. Without a state file (nobody served or promoted yet) the newest
    version is what is served.

    Args:
        settings: the deployment.
        cache: folder that keeps graphs, plans' timings and reports between builds.
        progress: told one line per step.
        options: what the command line adds.

    Raises:
        BuilderError: with what went wrong and what to do; nothing was published.
    """
    options = options or BuildOptions()
    if options.onnx is not None and not options.onnx.is_file():
        raise ExportError("no such ONNX file", value=str(options.onnx), remedy="correct --onnx")
    repository, source = settings.repository, open_source(settings.model)
    plan = bucket_plan(settings, source)
    if plan.notice:
        progress(plan.notice)
    recipe = recipe_for(target_of(settings), settings.engine.precision, options.only, options.skip)
    manifest = _manifest(settings, source, plan, recipe, options)
    engines = None
    if find_version(repository, manifest.fingerprint) is None:
        engines = make_engines(settings, source, plan, recipe, options, cache / manifest.graph_sha256[:12], progress)
        manifest = manifest.model_copy(update=engines.facts)
    # Not while building: that may take minutes, and a rollback cannot wait for it.
    with repository_lock(repository):
        parts = None if engines is None else VersionParts(engines.tokenizer, engines.files, manifest)
        version, built = _publish_once(repository, manifest.fingerprint, plan, parts, progress)
        configs = render_repository(settings, source)
        write_configs(repository, configs)
        served = served_now(repository)
    report = _report(engines, version, cache, progress) if engines is not None and built else None
    number = served.served if served else version
    if number != version:
        progress(f"version {number} is served; to serve {version}: make promote VERSION={version}")
    return BuildResult(repository, tuple(configs), version, plan, source, built, number, report)


def _report(engines: Engines, version: int, cache: Path, progress: Progress) -> Path:
    from builders.verify.report import write_report

    folder = cache.parent / "reports" / f"{engines.report.model}-v{version}-{engines.report.date[:19]}".replace(":", "")
    _, page = write_report(folder, engines.reported(version))
    progress(f"report: {page}")
    return folder


def _publish_once(
    repository: Path, fingerprint: str, plan: BucketPlan, parts: VersionParts | None, progress: Progress
) -> tuple[int, bool]:
    """The version with this fingerprint and whether it was published just now; another build may have been first."""
    for leftover in sweep(repository):
        progress(f"removed {leftover}: an interrupted build had left it")
    version = find_version(repository, fingerprint)
    if version is not None:
        progress(f"version {version} in {repository} is up to date")
        return version, False
    if parts is None:
        raise PublishError(f"a version of {repository} was removed while this build ran", remedy="build again")
    version = publish_version(repository, plan, parts)
    progress(f"published version {version} into {repository}")
    return version, True


def _manifest(
    settings: DeploySettings, source: EncoderSource, plan: BucketPlan, recipe: Recipe, options: BuildOptions
) -> Manifest:
    """The manifest but for what the steps and the publication add."""
    decisive: dict[str, Any] = {
        "model": source.folder.name,
        "model_sha256": source.sha256 if options.onnx is None else _sha256_of([options.onnx]),
        "serving_sha256": _sha256_of(sorted(SERVING.rglob("*.py"))),
        "graph_sha256": _sha256_of(GRAPH_MODULES),
        "task": "embedding",
        "engine": settings.engine.kind,
        "precision": recipe.precision,
        "steps": recipe.steps,
        "output": Output(size=source.dim),
        "max_tokens": plan.max_tokens,
        "positions": plan.positions,
        "pad_id": source.pad_id,
        "buckets": built_buckets(plan.buckets),
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(**decisive, date=date, git_commit=git_commit(), fingerprint="")
    deciding = manifest.model_dump_json(include=set(decisive)) + recipe.target
    return manifest.model_copy(update={"fingerprint": hashlib.sha256(deciding.encode()).hexdigest()})


def git_commit() -> str | None:
    """Commit of this project's checkout, with `+` behind it when files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = _said([*git, "rev-parse", "HEAD"])
        # An installed package may lie below somebody else's checkout.
        if not _said([*git, "ls-files", Path(__file__).name]):
            return None
        return commit + ("+" if _said([*git, "status", "--porcelain", "--untracked-files=no"]) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _sha256_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
