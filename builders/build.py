"""From settings to a published version: source, export, fuse, precision, gate, compile, publish, report.

A step that fails ends the build before anything is published.
"""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from builders.bucket import BucketPlan
from builders.calibration import Calibration
from builders.engine import Engines, Work, make_engines, target_of
from builders.ensembles import ensemble_lengths
from builders.errors import ExportError, PublishError
from builders.graph import Recipe, recipe_for
from builders.graph_file import sha256_of_graph
from builders.judge import calibration_of, datasets
from builders.lock import repository_lock
from builders.machine import this_machine
from builders.manifest import Manifest, built_buckets, output_of, published_versions, requests_of, sha256_of
from builders.names import entry_model, is_ensemble, make_command
from builders.publish import SERVING, VersionParts, find_version, publish_version, sweep
from builders.render import bucket_plan, render_repository, write_configs
from builders.settings import DeploySettings
from builders.source import EncoderSource, open_source
from builders.state import served_now
from builders.verify.data import Dataset

Progress = Callable[[str], None]

_HERE = Path(__file__).parent
#: What decides how the graph looks; a change in one of them makes another graph.
GRAPH_MODULES = (
    *(
        _HERE / f"{name}.py"
        for name in (
            "backbone",
            "calibration",
            "contract",
            "encoder",
            "export",
            "families",
            "finite",
            "generic",
            "graph",
            "graph_file",
            "heads",
            "int8",
            "precision",
            "sentence_folder",
            "source",
            "tasks",
            "tiling",
            "tokenizer_files",
        )
    ),
    *sorted((_HERE / "fuse").glob("*.py")),
    *sorted((_HERE / "tensorrt").glob("*.py")),
)
#: Packages that decide it, too.
GRAPH_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")


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
    calibration: Path | None = None
    """The user's own texts for int8's scales."""
    gate: bool = True
    """Run the accuracy gate. Off for tests of other things alone: the version then has no accuracy table."""


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        models: names to load, lanes first, the entry last.
        name: of the model, where the repository holds several; empty where it is the only one.
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
    name: str = ""

    @property
    def entry_model(self) -> str:
        """The Triton model that clients call."""
        return entry_model(self.name)

    @property
    def called_models(self) -> tuple[str, ...]:
        """All Triton models that clients call: the entry and the ensembles."""
        return (*(model for model in self.models if is_ensemble(model)), self.entry_model)


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
    data = datasets(options.data, source.task) if options.gate else ()
    plan = bucket_plan(settings, source)
    if plan.notice:
        progress(plan.notice)
    recipe = recipe_for(target_of(settings), settings.engine.precision, options.only, options.skip)
    texts = calibration_of(recipe.precision, source.task, options.calibration)
    manifest = _manifest(settings, source, plan, recipe, options, data, texts)
    engines = None
    found = find_version(repository, manifest.fingerprint, settings.name)
    if found is None:
        work = Work(graph_cache(cache), manifest.fingerprint[:16], cache.parent / "reports" / settings.name)
        engines = make_engines(settings, source, plan, recipe, options, data, work, progress, texts)
        manifest = manifest.model_copy(update=engines.facts)
    # Not while building: that may take minutes, and a rollback cannot wait for it. What was built is worth a wait.
    with repository_lock(repository, wait_s=600, name=settings.name):
        served_now(repository, settings.name)  # a broken state is said before anything is published
        parts = None if engines is None else VersionParts(engines.tokenizer, engines.files, manifest)
        version, built = _publish_once(repository, manifest, plan, parts, found, progress)
        configs = render_repository(settings, source)
        write_configs(repository, configs, settings.name)
        served = served_now(repository, settings.name)
    report = _report(engines, version, progress) if engines is not None and built else None
    number = served.served if served else version
    if number != version:
        command = make_command(f"promote VERSION={version}", settings.name)
        progress(f"version {number} is served; to serve {version}: {command}")
    return BuildResult(repository, tuple(configs), version, plan, source, built, number, report, settings.name)


def graph_cache(cache: Path) -> Path:
    """The part of the cache that belongs to today's code and packages."""
    return cache / _graph_sha256()[:12]


def _graph_sha256() -> str:
    digest = hashlib.sha256(_sha256_of(GRAPH_MODULES).encode())
    for package in GRAPH_PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update(f"{package}=={package_version(package)}\n".encode())
    return digest.hexdigest()


def _report(engines: Engines, version: int, progress: Progress) -> Path:
    folder = engines.write_report(version)
    progress(f"report: {folder / 'report.html'}")
    return folder


def _publish_once(
    repository: Path,
    manifest: Manifest,
    plan: BucketPlan,
    parts: VersionParts | None,
    found: int | None,
    progress: Progress,
) -> tuple[int, bool]:
    """The version with this fingerprint and whether it was published just now.

    Either `found` is the version that was there before the lock was taken, or `parts` is what was built meanwhile, in
    which time another build may have been first.
    """
    name = manifest.name
    for leftover in sweep(repository, name):
        progress(f"removed {leftover}: an interrupted build had left it")
    if parts is None:
        # A version never changes: of one whose files were hashed a moment ago, only whether it is still there is asked.
        if found is None or found not in published_versions(repository, name):
            raise PublishError(f"a version of {repository} was removed while this build ran", remedy="build again")
    else:
        found = find_version(repository, manifest.fingerprint, name)
        if found is None:
            version = publish_version(repository, plan, parts)
            progress(f"published version {version} into {repository}")
            return version, True
    progress(f"version {found} in {repository} is up to date")
    return found, False


def _manifest(
    settings: DeploySettings,
    source: EncoderSource,
    plan: BucketPlan,
    recipe: Recipe,
    options: BuildOptions,
    data: Sequence[Dataset],
    texts: Calibration | None,
) -> Manifest:
    """The manifest but for what the steps and the publication add."""
    decisive: dict[str, Any] = {
        "model": settings.model.source.rstrip("/").rpartition("/")[2],
        "model_sha256": source.sha256 if options.onnx is None else sha256_of_graph(options.onnx),
        "serving_sha256": _sha256_of(sorted(SERVING.rglob("*.py"))),
        "graph_sha256": _graph_sha256(),
        "task": source.task.name,
        "engine": settings.engine.kind,
        "precision": recipe.precision,
        "steps": recipe.steps,
        "output": output_of(source.task),
        "requests": requests_of(source.task),
        "max_tokens": plan.max_tokens,
        "positions": plan.positions,
        "pad_id": source.pad_id,
        "buckets": built_buckets(plan.buckets),
        "ensembles": ensemble_lengths(settings, source.task, plan),
        "gate": _gate_facts(settings, options, data),
        "calibration": texts.facts if texts is not None else {},
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(**decisive, name=settings.name, date=date, git_commit=git_commit(), fingerprint="")
    # A plan runs on its own kind of machine alone: elsewhere it is another version.
    place = str(this_machine()) if settings.engine.kind == "tensorrt" else ""
    deciding = "\n".join([manifest.model_dump_json(include=set(decisive)), recipe.target, source.sha256, place])
    return manifest.model_copy(update={"fingerprint": hashlib.sha256(deciding.encode()).hexdigest()})


def _gate_facts(settings: DeploySettings, options: BuildOptions, data: Sequence[Dataset]) -> dict[str, Any]:
    """What the gate judges with: a version that was judged otherwise is another one."""
    if not options.gate:
        return {}
    own = "built-in" if options.data is None else sha256_of(options.data)
    return {"data": [dataset.name for dataset in data], "sha256": own, "limit": settings.objectives.accuracy_loss}


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
