"""A version of the model repository: complete, or not there.

Version N is a set, `encode/N` and `encoder_<bucket>/N` for every bucket. It is put together in a staging folder on
the same file system and moved into place folder by folder, `encode/N` last: until then nothing names version N.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builders.serving
from builders.bucket import BucketPlan
from builders.errors import PublishError
from builders.render import ENTRY, lane_folders

SERVING = Path(builders.serving.__file__).parent
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class VersionParts:
    """What a version is made of: the tokeniser, the engine's file and what the manifest says about them."""

    tokenizer: Path
    onnx: Path
    manifest: dict[str, Any]

    @property
    def engine_files(self) -> list[Path]:
        """The graph, and its weights where they are in a file of their own (above 2 GB)."""
        external = self.onnx.with_name(f"{self.onnx.name}.data")
        return [self.onnx, *([external] if external.exists() else [])]


def read_manifest(repository: Path, version: int) -> dict[str, Any] | None:
    """The manifest of a published version, or None where there is no such version or nothing that can be one."""
    try:
        manifest = json.loads((repository / ENTRY / str(version) / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def is_complete(repository: Path, version: int, plan: BucketPlan) -> bool:
    """Every folder of a version is there."""
    names = [ENTRY, *(bucket.model for bucket in plan.buckets)]
    return all((repository / name / str(version) / "model.py").exists() for name in names)


def publish_version(repository: Path, version: int, plan: BucketPlan, parts: VersionParts) -> None:
    """Write version `version`; one that is there already is replaced.

    Args:
        repository: the model repository.
        version: number of the version.
        plan: the buckets, one lane folder each.
        parts: what goes in. The engine's file is hard-linked into every lane where the file system can.

    Raises:
        PublishError: a folder could not be written. The version is then absent, or as it was.
    """
    try:
        # Inside a model's folder, where Triton passes over what is no number: a leftover of a killed build beside the
        # models would be taken for one.
        home = repository / ENTRY
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=home) as staging:
            _swap_in(repository, version, Path(staging), _stage(Path(staging), version, plan, parts))
    except OSError as error:
        raise PublishError(
            f"version {version} could not be published into {repository}",
            value=str(error),
            remedy="free some space or correct the permissions, then build again",
        ) from error


def _stage(staging: Path, version: int, plan: BucketPlan, parts: VersionParts) -> list[str]:
    """Write every folder of the version below `staging`; the order is the order of publishing."""
    for bucket in plan.buckets:
        folder = _code(staging, "lane", bucket.model, version)
        for file in parts.engine_files:
            _link(file, folder / file.name)
    folder = _code(staging, "entry", ENTRY, version)
    shutil.copyfile(parts.tokenizer, folder / "tokenizer.json")
    (folder / MANIFEST).write_text(json.dumps(parts.manifest, indent=2) + "\n", encoding="utf-8")
    return [*(bucket.model for bucket in plan.buckets), ENTRY]


def _code(staging: Path, kind: str, model: str, version: int) -> Path:
    """The version folder of a model with its model.py and the package beside it."""
    folder = staging / model / str(version)
    # site-packages comes before the model's folder on a stub's path: a plain name could be hidden by another package.
    package = folder / f"lanes_{kind}"
    package.mkdir(parents=True)
    for file in sorted((SERVING / kind).glob("*.py")):
        shutil.copyfile(file, (folder if file.name == "model.py" else package) / file.name)
    return folder


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def _swap_in(repository: Path, version: int, staging: Path, names: list[str]) -> None:
    """Move the staged folders into place, the entry last, and what was there out of the way, the entry first.

    When a move fails, what was there is put back.
    """
    moved: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
        moved.append((source, target))

    try:
        for name in [ENTRY, *(folder.name for folder in lane_folders(repository))]:
            if (repository / name / str(version)).exists():
                move(repository / name / str(version), staging / "retired" / name)
        for name in names:
            move(staging / name / str(version), repository / name / str(version))
    except BaseException:
        for source, target in reversed(moved):
            os.replace(target, source)
        raise
