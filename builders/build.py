"""From settings to a published version: open the source, export, publish, render."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builders.bucket import BucketPlan
from builders.errors import BuilderError, PublishError
from builders.lock import repository_lock
from builders.manifest import Manifest, Output, built_buckets
from builders.publish import SERVING, VersionParts, find_version, publish_version, sweep
from builders.render import bucket_plan, render_repository, write_configs
from builders.settings import DeploySettings
from builders.source import EncoderSource, open_source
from builders.state import served_now

Progress = Callable[[str], None]

#: What decides how the graph looks; a change in one of them makes another graph.
GRAPH_MODULES = tuple(
    Path(__file__).with_name(name) for name in ("encoder.py", "export.py", "tiling.py", "tokenizer_files.py")
)


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        models: names to load, lanes first, the entry last.
        version: the version that was published, or found up to date.
        served: the version that the configurations serve; another one until `version` is promoted.
        built: False when the version was up to date and nothing was written.
    """

    repository: Path
    models: tuple[str, ...]
    version: int
    plan: BucketPlan
    source: EncoderSource
    built: bool
    served: int


def build(settings: DeploySettings, cache: Path, progress: Progress) -> BuildResult:
    """Build and publish a new version, or find one that is up to date; what is served stays as it is.

    A version with the same fingerprint is reused. Without a state file (nobody served or promoted yet) the newest
    version is what is served.

    Args:
        settings: the deployment.
        cache: folder that keeps exported graphs between builds, by the hash of what they were made from.
        progress: told one line per step.

    Raises:
        BuilderError: with what went wrong and what to do; nothing was published.
    """
    if settings.engine.kind != "onnxruntime":
        raise BuilderError(
            "this build makes ONNX Runtime engines only",
            value=settings.engine.kind,
            limit="engine.kind: onnxruntime",
            remedy='use --config deploy.cpu.yaml; plans for a GPU come with the compile step (README, "Status")',
        )
    repository, source = settings.repository, open_source(settings.model)
    plan = bucket_plan(settings, source)
    if plan.notice:
        progress(plan.notice)
    manifest = _manifest(source, plan)
    parts = None
    if find_version(repository, manifest.fingerprint) is None:
        onnx, exported = _exported(source, cache, progress)
        parts = VersionParts(_tokenizer(source, cache), onnx, manifest.model_copy(update={"export": exported}))
    # Not while exporting: that may take minutes, and a rollback cannot wait for it.
    with repository_lock(repository):
        version, built = _publish_once(repository, manifest.fingerprint, plan, parts, progress)
        configs = render_repository(settings, source)
        write_configs(repository, configs)
        served = served_now(repository)
    number = served.served if served else version
    if number != version:
        progress(f"version {number} is served; to serve {version}: make promote VERSION={version}")
    return BuildResult(repository, tuple(configs), version, plan, source, built, number)


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


def _manifest(source: EncoderSource, plan: BucketPlan) -> Manifest:
    """The manifest but for what the export and the publication add."""
    decisive: dict[str, Any] = {
        "model": source.folder.name,
        "model_sha256": source.sha256,
        "serving_sha256": _sha256_of(sorted(SERVING.rglob("*.py"))),
        "graph_sha256": _sha256_of(GRAPH_MODULES),
        "task": "embedding",
        "engine": "onnxruntime",
        "precision": "fp32",
        "output": Output(size=source.dim),
        "max_tokens": plan.max_tokens,
        "positions": plan.positions,
        "pad_id": source.pad_id,
        "buckets": built_buckets(plan.buckets),
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(**decisive, date=date, git_commit=git_commit(), fingerprint="")
    deciding = manifest.model_dump_json(include=set(decisive))
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


def _exported(source: EncoderSource, cache: Path, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """The exported graph and its report, made once per model and exporter."""
    folder = cache / f"{source.sha256[:16]}-{_sha256_of(GRAPH_MODULES)[:16]}"
    path, report = folder / "model.onnx", folder / "export.json"
    if not (path.exists() and report.exists()):
        # torch and transformers take seconds to import; an up-to-date build does not need them.
        from builders.export import export_onnx

        folder.mkdir(parents=True, exist_ok=True)
        progress(f"exporting {source.folder.name} ({source.family}, {source.positions} positions) to ONNX")
        made = export_onnx(source, path)
        report.write_text(json.dumps(asdict(made), indent=2, default=str) + "\n", encoding="utf-8")
    facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    facts.pop("path", None)
    return path, facts


def _tokenizer(source: EncoderSource, cache: Path) -> Path:
    from builders.tokenizer_files import write_tokenizer

    folder = cache / f"{source.sha256[:16]}-tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    return write_tokenizer(source, folder)
