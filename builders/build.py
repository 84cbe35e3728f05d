"""From settings to a published version: open the source, export, publish, render."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builders.bucket import BucketPlan
from builders.errors import BuilderError
from builders.publish import SERVING, VersionParts, is_complete, publish_version, read_manifest
from builders.render import bucket_plan, render_configs, write_configs
from builders.settings import DeploySettings
from builders.source import EncoderSource, open_source

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
        version: the published version.
        built: False when the version was up to date and nothing was written.
    """

    repository: Path
    models: tuple[str, ...]
    version: int
    plan: BucketPlan
    source: EncoderSource
    built: bool


def build(settings: DeploySettings, cache: Path, progress: Progress, version: int = 1) -> BuildResult:
    """Build and publish a version, or find that it is up to date.

    Args:
        settings: the deployment.
        cache: folder that keeps exported graphs between builds, by the hash of what they were made from.
        progress: told one line per step.
        version: number of the version.

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
    source = open_source(settings.model)
    plan = bucket_plan(settings, source)
    if plan.notice:
        progress(plan.notice)
    configs = render_configs(settings, source, (version,))
    manifest = _manifest(source, plan)
    there = (read_manifest(settings.repository, version) or {}).get("fingerprint")
    built = there != manifest["fingerprint"] or not is_complete(settings.repository, version, plan)
    if built:
        onnx, exported = _exported(source, cache, progress)
        tokenizer = _tokenizer(source, cache)
        manifest |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "export": exported}
        publish_version(settings.repository, version, plan, VersionParts(tokenizer, onnx, manifest))
        progress(f"published version {version} into {settings.repository}")
    else:
        progress(f"version {version} in {settings.repository} is up to date")
    write_configs(settings.repository, configs)
    return BuildResult(settings.repository, tuple(configs), version, plan, source, built)


def _manifest(source: EncoderSource, plan: BucketPlan) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": source.folder.name,
        "model_sha256": source.sha256,
        "serving_sha256": _sha256_of(sorted(SERVING.rglob("*.py"))),
        "graph_sha256": _sha256_of(GRAPH_MODULES),
        "task": "embedding",
        "engine": "onnxruntime",
        "precision": "fp32",
        "dim": source.dim,
        "max_tokens": plan.max_tokens,
        "buckets": [asdict(bucket) for bucket in plan.buckets],
    }
    facts["fingerprint"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return facts


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
