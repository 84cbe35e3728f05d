"""A version of the model repository: complete, or not there.

Version N is a set, `encode/N`, `encoder_<bucket>/N` for every bucket, and the ensembles with their steps (with the name
of its model in their names where there are several; each model has numbers of its own). It is put together in a staging
folder on the same file system and moved into place folder by folder, `encode/N` last: until then nothing names version
N.
A version that is there is never touched again.

The staging folder lies inside `encode`: beside the models Triton would take it for one. As long as it exists, its
publication is not over; it names the lanes that may have been moved, so that `sweep` can finish what a killed process
could not. All functions here need `builders.lock.repository_lock`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import builders.serving
from builders.bucket import BucketPlan
from builders.errors import ManifestError, PublishError
from builders.manifest import (
    MANIFEST,
    Manifest,
    PublishedFile,
    check_complete,
    published_versions,
    read_manifest,
    sha256_of,
    version_numbers,
)
from builders.names import entry_model, is_lane, is_of_ensemble

SERVING = Path(builders.serving.__file__).parent
_STAGING = ".staging-"
_JOURNAL = "lanes.json"


@dataclass(frozen=True)
class VersionParts:
    """What a version is made of.

    Attributes:
        tokenizer: tokenizer.json.
        engine: the engine's file, one for all lanes or one per bucket model; it is published as `model` with its own
            suffix, and the weights beside it (its name with `.data` behind) under their own name.
        manifest: what is known of it; publish adds the hashes of the files.
    """

    tokenizer: Path
    engine: Path | Mapping[str, Path]
    manifest: Manifest

    def engine_files(self, model: str) -> dict[str, Path]:
        """File name in the lane's folder -> file, for one bucket model."""
        engine = self.engine if isinstance(self.engine, Path) else self.engine[model]
        files = {f"model{engine.suffix}": engine}
        weights = engine.with_name(f"{engine.name}.data")
        if weights.is_file():
            # The graph names it: ONNX finds external data by its file name.
            files[weights.name] = weights
        return files


def find_version(repository: Path, fingerprint: str, name: str = "") -> int | None:
    """The newest whole version of the model `name` with this fingerprint, or None."""
    for version in reversed(published_versions(repository, name)):
        try:
            manifest = read_manifest(repository, version, name)
            if manifest.fingerprint != fingerprint:
                continue
            # With the content: what was damaged is not up to date, and building again is the remedy that is told.
            check_complete(repository, version, manifest, hashes=True)
        except ManifestError:
            continue
        return version
    return None


def next_version(repository: Path, name: str = "") -> int:
    """The next number that no folder of the entry or of any lane of the model `name` has."""
    own = (
        path
        for path in repository.iterdir()
        if path.name == entry_model(name) or is_lane(path.name, name) or is_of_ensemble(path.name, name)
    )
    taken = (number for path in own for number in version_numbers(path))
    return max(taken, default=0) + 1


def publish_version(repository: Path, plan: BucketPlan, parts: VersionParts) -> int:
    """Write a new version of the model that the manifest names; its leftovers of interrupted builds are removed first.

    Args:
        repository: the model repository; the caller holds its lock.
        plan: the buckets, one lane folder each.
        parts: what goes in. An engine is one file that its lanes share by hard links, where the file system can; it is
            a copy of what was given. Triton takes one name more or less of a file for a change of it, and would load a
            version again for what a cleared cache or another repository does with the same file.

    Returns:
        Its number.

    Raises:
        PublishError: a folder could not be written; the repository is as it was.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        name = parts.manifest.name
        entry = entry_model(name)
        sweep(repository, name)
        version = next_version(repository, name)
        with _staging(repository / entry, version) as staging:
            models = [bucket.model for bucket in plan.buckets]
            models += [step for *steps, _ in parts.manifest.steps_of_ensembles for step in steps]
            models += parts.manifest.ensemble_models
            (staging / _JOURNAL).write_text(json.dumps({"version": version, "lanes": models}), encoding="utf-8")
            _stage(staging, version, plan, parts)
            _sync(staging)
            for model in (*models, entry):
                target = repository / model / str(version)
                target.parent.mkdir(exist_ok=True)
                if model == entry:
                    # What the commit names must be on the disk before it.
                    for lane in models:
                        _sync_file(repository / lane)
                os.replace(staging / model / str(version), target)
            _sync_file(repository / entry)
    except OSError as error:
        raise PublishError(
            f"a version could not be published into {repository}; it is as it was",
            value=str(error),
            remedy="free some space or correct the permissions, then build again",
        ) from error
    return version


def sweep(repository: Path, name: str = "") -> list[str]:
    """Remove what interrupted publications of a model left: their staging folders and the lanes that nothing names.

    Returns:
        What was removed, relative to the repository.
    """
    removed, entry = [], repository / entry_model(name)
    for staging in sorted(entry.glob(f"{_STAGING}*")):
        removed += _undo(staging)
        removed.append(f"{entry.name}/{staging.name}")
    if removed:
        _remove_if_empty(entry)
    return removed


@contextmanager
def _staging(entry: Path, version: int) -> Iterator[Path]:
    entry.mkdir(exist_ok=True)
    try:
        staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{version}-", dir=entry))
        try:
            yield staging
        finally:
            _undo(staging)
    finally:
        _remove_if_empty(entry)


def _undo(staging: Path) -> list[str]:
    """End a publication: without `encode/N`, its lanes go; the staging folder, which says so, goes last."""
    removed, entry = [], staging.parent
    repository = entry.parent
    with suppress(FileNotFoundError, ValueError, KeyError):
        # Written before anything is moved: where it cannot be read, nothing was.
        journal = json.loads((staging / _JOURNAL).read_text(encoding="utf-8"))
        version = str(journal["version"])
        if not (entry / version).exists():
            for lane in journal["lanes"]:
                if (repository / lane / version).exists():
                    shutil.rmtree(repository / lane / version)
                    removed.append(f"{lane}/{version}")
                _remove_if_empty(repository / lane)
    # The journal goes last: a sweep that is itself killed is finished by the next one.
    for path in staging.iterdir():
        if path.name != _JOURNAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(staging)
    return removed


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _stage(staging: Path, version: int, plan: BucketPlan, parts: VersionParts) -> None:
    """Write every folder of the version below `staging`, the manifest last."""
    files, hashes, manifest, copies = [], _Hashes(), parts.manifest, dict[Path, Path]()
    lanes = [(bucket.model, bucket.model, _LANE) for bucket in plan.buckets]
    for tokenize, queued, length in manifest.steps_of_ensembles:
        lanes.append((queued, manifest.lane_model(length), _QUEUED))
        shutil.copyfile(parts.tokenizer, _code(staging, tokenize, version, _TOKENIZE) / "tokenizer.json")
    for model in manifest.ensemble_models:
        # Triton wants the folder and nothing in it.
        (staging / model / str(version)).mkdir(parents=True)
    for model, of, code in lanes:
        # The code lies beside a plan, too: which backend runs it is a setting and not a property of the version.
        folder = _code(staging, model, version, code)
        for name, source in parts.engine_files(of).items():
            if source in copies:
                _link(copies[source], folder / name)
            else:
                copies[source] = Path(shutil.copyfile(source, folder / name))
            path = f"{model}/{name}"
            files.append(PublishedFile(path=path, sha256=hashes[source], bytes=source.stat().st_size))
    folder = _code(staging, manifest.entry_model, version, _ENTRY)
    shutil.copyfile(parts.tokenizer, folder / "tokenizer.json")
    facts = {"files": tuple(files), "tokenizer_sha256": hashes[parts.tokenizer]}
    text = parts.manifest.model_copy(update=facts).model_dump_json(indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


class _Hashes(dict[Path, str]):
    """Hashes by path, each file read once."""

    def __missing__(self, path: Path) -> str:
        self[path] = sha256_of(path)
        return self[path]


@dataclass(frozen=True)
class _Code:
    """What runs in a model's version folder: its model.py, and the packages of `builders/serving` beside it."""

    main: Path
    packages: tuple[str, ...]


_ENTRY = _Code(SERVING / "entry" / "model.py", ("entry",))
_LANE = _Code(SERVING / "lane" / "model.py", ("lane",))
_TOKENIZE = _Code(SERVING / "ensemble" / "tokenize_model.py", ("ensemble", "entry"))
_QUEUED = _Code(SERVING / "ensemble" / "queued_model.py", ("ensemble", "lane", "entry"))


def _code(staging: Path, model: str, version: int, code: _Code) -> Path:
    """The version folder of a model with its model.py and the packages beside it."""
    folder = staging / model / str(version)
    folder.mkdir(parents=True)
    shutil.copyfile(code.main, folder / "model.py")
    places = [folder]
    shared = [file for file in SERVING.glob("*.py") if file.name != "__init__.py"]
    for kind in code.packages:
        # site-packages comes before the model's folder on a stub's path: another package could hide a plain name.
        package, source = folder / f"lanes_{kind}", SERVING / kind
        for file in sorted((*source.rglob("*.py"), *shared)):
            if file != code.main:
                target = package / (file.name if file in shared else file.relative_to(source))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        places += [package, *(path for path in package.iterdir() if path.is_dir())]
    # Python cannot write bytecode where a file has that name. Bytecode would change the folder after Triton has read
    # its times, and Triton would load this version again, beside itself, whenever another one is added (2.51).
    for place in places:
        (place / "__pycache__").touch()
    return folder


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def _sync(folder: Path) -> None:
    """Bring a tree to the disk, so that no power cut can leave an empty file behind a published name."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_file(Path(parent) / name)
        _sync_file(Path(parent))


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
