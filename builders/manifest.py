"""`manifest.json` of a version: what it was made from, by what, for which machine; and what it may replace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builders.bucket import Bucket
from builders.errors import ManifestError
from builders.names import ENTRY as ENTRY
from builders.names import (
    ensemble_model,
    entry_model,
    lane_model,
    make_command,
    of_model,
    own_file,
    queued_model,
    tokenize_model,
)
from builders.tasks import Pair, Task, TaskFacts

MANIFEST = "manifest.json"
#: 1 knew embeddings alone: its code cannot read the parameters that are rendered now.
SCHEMA: Literal[2] = 2
_REBUILD = "make build-engines"


class Facts(BaseModel):
    """Base of all parts of a manifest: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class BuiltBucket(Facts):
    """A bucket as far as the engine fixes it."""

    length: int = Field(ge=1)
    """Tokens a text is padded to."""
    index: int = Field(ge=0)
    """Optimisation profile in the plan."""
    batch: int = Field(ge=1)
    """Largest batch, texts."""


class Output(Facts):
    """What the entry answers: clients depend on it, so a version with another one is another model."""

    name: str = "EMBEDDING"
    """Name of the lanes' output tensor."""
    size: int = Field(ge=1)
    """Its last axis."""
    labels: tuple[str, ...] | None = None
    """Names of the places on that axis, for a classifier or a tagger."""
    per_token: bool = False
    """It has a row for each token."""


class Requests(Facts):
    """What a request may ask of the version."""

    pair: Pair = "none"
    """Whether it may or must bring a second text."""
    segment: bool = False
    """The lanes are told where the second text begins."""
    normalize: bool = False
    """Vectors have length 1, and so has what is made of them."""
    dimensions: tuple[int, ...] = ()
    """Sizes that vectors may be cut to."""
    prompts: dict[str, str] = {}
    """Texts put before a text, by name."""
    default_prompt: str | None = None
    """The prompt of a request that names none."""


class Machine(Facts):
    """The machine that a plan was made for: a TensorRT plan runs nowhere else."""

    gpu: str | None = None
    """Name of the GPU, as the driver says it."""
    compute_capability: str | None = None
    """Compute capability, "9.0"."""
    tensorrt: str | None = None
    """TensorRT version, "10.14.1"."""

    def __str__(self) -> str:
        """One line for people."""
        capability = f" (compute capability {self.compute_capability})" if self.compute_capability else ""
        return f"{self.gpu or 'no GPU'}{capability}, {f'TensorRT {self.tensorrt}' if self.tensorrt else 'no TensorRT'}"


class PublishedFile(Facts):
    """A file of the version, by its path in the repository without the version's number."""

    path: str
    """`encoder_128/model.plan`."""
    sha256: str
    """Hash of its bytes."""
    bytes: int = Field(ge=0)
    """Its size."""


class Accuracy(Facts):
    """A row of the accuracy table."""

    metric: str
    """What was measured."""
    reference: float
    """Of the FP32 model."""
    candidate: float
    """Of this version."""
    loss: float
    """(reference - candidate) / reference."""
    limit: float
    """The largest loss that passes."""


class BucketTime(Facts):
    """What a bucket takes with texts that fill it."""

    length: int
    """Tokens of each text."""
    batch: int
    """Largest batch, texts."""
    one_ms: float
    """One text, milliseconds."""
    batch_ms: float | None = None
    """A full batch, milliseconds; none where the bucket takes single texts, or it would have taken too long."""


class Latency(Facts):
    """What the engines take, measured when they were built."""

    how: str
    """What was run and where; the median of a few runs."""
    buckets: tuple[BucketTime, ...]
    """The buckets, rising."""


class Manifest(Facts):
    """Everything that is known of a version; written once, never changed."""

    schema_version: Literal[2] = SCHEMA
    """Version of this form, and of what the entry's and the lanes' code reads of their configurations."""
    name: str = ""
    """Name of the model among several of one repository; empty where it is the only one."""
    model: str
    """Name of the source model."""
    model_sha256: str
    """Hash of the source model's files and of the settings that decide its vectors."""
    task: Task = "embedding"
    """What the model answers."""
    output: Output
    """The answer's form."""
    requests: Requests = Requests()
    """What a request may ask."""
    engine: Literal["onnxruntime", "tensorrt"]
    """What runs the lanes."""
    precision: str
    """Arithmetic of the engine."""
    steps: tuple[str, ...] = ()
    """Fusion and precision steps, in their order."""
    buckets: tuple[BuiltBucket, ...] = Field(min_length=1)
    """The buckets, rising."""
    ensembles: tuple[int, ...] = ()
    """Lengths of the buckets that have a declarative ensemble, rising."""
    max_tokens: int = Field(ge=1)
    """Longest text, tokens; a longer one is cut."""
    positions: int = Field(ge=1)
    """Positions of the graph."""
    pad_id: int = Field(ge=0)
    """Padding token."""
    machine: Machine | None = None
    """The machine a plan was made for; none for an engine that runs anywhere."""
    profile_memory: dict[str, int] = {}
    """Activation memory by bucket model, bytes."""
    accuracy: tuple[Accuracy, ...] = ()
    """The accuracy table."""
    latency: Latency | None = None
    """What its engines take; none where the build left it out."""
    gate: dict[str, Any] = {}
    """What the accuracy gate judged with: data and limit; empty when it was left out."""
    calibration: dict[str, Any] = {}
    """What int8 was calibrated with: name, number and hash of the texts; empty for other precisions."""
    products: tuple[dict[str, Any], ...] = ()
    """What int8 chose for each product (`builders.int8.Int8Product`)."""
    export: dict[str, Any] = {}
    """The exporter's report."""
    serving_sha256: str
    """Hash of the code beside the engines."""
    graph_sha256: str
    """Hash of the code that made the graph."""
    git_commit: str | None = None
    """Commit of the project, `+` behind it when the tree had changes."""
    date: str
    """When it was built, ISO 8601 with its offset."""
    fingerprint: str
    """Hash of all that decides the answers: equal fingerprints, equal versions."""
    tokenizer_sha256: str = ""
    """Hash of tokenizer.json; filled in by publish."""
    files: tuple[PublishedFile, ...] = ()
    """Engine files of the lanes; filled in by publish."""

    @property
    def steps_of_ensembles(self) -> tuple[tuple[str, str, int], ...]:
        """For each ensemble its two steps, the tokenising one and the queued lane, and its length."""
        return tuple(
            (tokenize_model(self.name, length), queued_model(self.name, length), length) for length in self.ensembles
        )

    @property
    def ensemble_models(self) -> tuple[str, ...]:
        """Names of the ensembles."""
        return tuple(ensemble_model(self.name, length) for length in self.ensembles)

    @property
    def entry_model(self) -> str:
        """Name of the Triton model that clients call."""
        return entry_model(self.name)

    def lane_model(self, length: int) -> str:
        """Name of the Triton model of a bucket."""
        return lane_model(self.name, length)


def output_of(task: TaskFacts) -> Output:
    """What a manifest keeps of a task's output."""
    return Output(name=task.output, size=task.size, labels=task.labels or None, per_token=task.per_token)


def requests_of(task: TaskFacts) -> Requests:
    """What a manifest keeps of what a request may ask."""
    return Requests(
        pair=task.pair,
        segment=task.segment,
        normalize=task.normalize,
        dimensions=task.dimensions,
        prompts=dict(task.prompts),
        default_prompt=task.default_prompt,
    )


def built_buckets(buckets: tuple[Bucket, ...]) -> tuple[BuiltBucket, ...]:
    """What a manifest keeps of the buckets."""
    return tuple(BuiltBucket(length=b.length, index=b.index, batch=b.batch) for b in buckets)


def published_versions(repository: Path, name: str = "") -> tuple[int, ...]:
    """Numbers of a model's published versions, rising: those that its entry has a folder of."""
    return tuple(sorted(version_numbers(repository / entry_model(name))))


def version_numbers(model: Path) -> Iterator[int]:
    """Numbers of a model's version folders; Triton ignores names with leading zeros."""
    if not model.is_dir():
        return
    for path in model.iterdir():
        if path.name.isascii() and path.name.isdigit() and path.name[0] != "0" and path.is_dir():
            yield int(path.name)


def read_manifest(repository: Path, version: int, name: str = "") -> Manifest:
    """The manifest of a published version of the model `name`.

    Raises:
        ManifestError: there is no such version, or its manifest is missing, no JSON, of another form, wrong, or
            of another model.
    """
    path = repository / entry_model(name) / str(version) / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(str(number) for number in published_versions(repository, name)) or "none"
        missing = f"version {version}{of_model(name)} has no manifest"
        what = missing if path.parent.is_dir() else f"{repository} has no such version{of_model(name)}"
        raise ManifestError(what, value=version, limit=f"published: {there}", remedy=_REBUILD) from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read: {error}", remedy=_REBUILD) from None
    form = document.get("schema_version") if isinstance(document, dict) else None
    if form != SCHEMA:
        state = repository / own_file(name, "served", ".json")
        raise ManifestError(
            f"{path} has another form", value=f"schema_version {form}", limit=f"schema_version {SCHEMA}",
            remedy=f"{_REBUILD}; where this version is served, remove {state} first: then the newest one is",
        )  # fmt: skip
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['input']!r}: {p['msg']}" for p in error.errors())
        raise ManifestError(f"{path}: {problems}", remedy=f"restore the file, or {_REBUILD}") from None
    if manifest.name != name:
        # Its lanes' names are in it: a folder that was copied from one model to another is no version of it.
        raise ManifestError(
            f"{path} was published as another model", value=manifest.entry_model, limit=entry_model(name),
            remedy=make_command("build-engines", name),
        )  # fmt: skip
    return manifest


def check_complete(repository: Path, version: int, manifest: Manifest, *, hashes: bool = False) -> None:
    """Make sure that every file of a version is there, of its size and, with `hashes`, of its content.

    Raises:
        ManifestError: naming the first file that is missing or differs.
    """
    entry = manifest.entry_model
    tokenizing = (entry, *(tokenize for tokenize, _, _ in manifest.steps_of_ensembles))
    lanes = [manifest.lane_model(bucket.length) for bucket in manifest.buckets]
    lanes += [queued for _, queued, _ in manifest.steps_of_ensembles]
    for model in manifest.ensemble_models:
        if not (repository / model / str(version)).is_dir():
            raise _incomplete(repository, version, f"{model}/{version} is missing")
    # Beside a plan, too: which backend runs it is a setting.
    for model in (*tokenizing, *lanes):
        if not (repository / model / str(version) / "model.py").is_file():
            raise _incomplete(repository, version, f"{model}/{version}/model.py is missing")
    seen: dict[tuple[int, int], str] = {}
    tokenizers = (
        PublishedFile(path=f"{model}/tokenizer.json", sha256=manifest.tokenizer_sha256, bytes=0) for model in tokenizing
    )
    for file in (*tokenizers, *manifest.files):
        model, _, name = file.path.partition("/")
        path = repository / model / str(version) / name
        if not path.is_file():
            raise _incomplete(repository, version, f"{model}/{version}/{name} is missing")
        stat = path.stat()
        if file.bytes and stat.st_size != file.bytes:
            raise _incomplete(repository, version, f"{path.name} of {model} has {stat.st_size} bytes, not {file.bytes}")
        if hashes:
            key = (stat.st_dev, stat.st_ino)  # a file linked into every lane is read once
            seen.setdefault(key, sha256_of(path))
            if seen[key] != file.sha256:
                raise _incomplete(repository, version, f"{path.name} of {model} is not the file that was published")


def _incomplete(repository: Path, version: int, problem: str) -> ManifestError:
    return ManifestError(f"version {version} of {repository} is damaged: {problem}", remedy=_REBUILD)


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_compatible(old: Manifest, new: Manifest) -> None:
    """Make sure that `new` may take the place of `old` without clients noticing more than other numbers.

    Raises:
        ManifestError: the task, the output's name or size, the labels or the texts it takes differ: that is another
            model.
    """
    pairs = {
        "task": (old.task, new.task),
        "output": (old.output.name, new.output.name),
        "output size": (old.output.size, new.output.size),
        "labels": (old.output.labels, new.output.labels),
        "second text": (old.requests.pair, new.requests.pair),
        # Versions side by side share the lanes' configuration.
        "segments": (old.requests.segment, new.requests.segment),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            raise ManifestError(
                f"this version is another model, its {name} differs from the served one's", value=after,
                limit=f"{before!r}",
                remedy="list it under `models` with a name of its own, or serve it from another repository",
            )  # fmt: skip


def check_fits(manifest: Manifest, machine: Machine) -> None:
    """Make sure that the engine of a version runs on `machine`; an ONNX Runtime engine does everywhere.

    Raises:
        ManifestError: with both fingerprints; a plan runs on its own kind of GPU and TensorRT version alone.
    """
    if manifest.engine != "tensorrt":
        return
    made = manifest.machine or Machine()
    same = (
        made.gpu == machine.gpu
        and made.compute_capability == machine.compute_capability
        and made.tensorrt is not None
        and _release(made.tensorrt) == _release(machine.tensorrt or "")
    )
    if not same:
        raise ManifestError(
            "the plan was made for another machine", value=str(made), limit=f"this one: {machine}", remedy=_REBUILD
        )


def _release(version: str) -> tuple[str, ...]:
    """Major, minor, patch: packages carry a fourth number, libraries do not."""
    return tuple(version.split(".")[:3])
