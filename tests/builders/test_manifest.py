"""Manifests: what is written is read, what is wrong is said, and what may replace what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders.errors import ManifestError
from builders.machine import release_of
from builders.manifest import (
    Accuracy,
    Machine,
    Output,
    Requests,
    check_compatible,
    check_complete,
    check_fits,
    published_versions,
    read_manifest,
)
from builders.publish import publish_version
from tests.builders.test_publish import LENGTHS, manifest, parts, plan

H200 = Machine(gpu="NVIDIA H200", compute_capability="9.0", tensorrt="10.14.1")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    return tmp_path / "r"


def rewrite(repository: Path, **facts: Any) -> None:
    path = repository / "encode/1/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_manifest_read_as_it_was_written(repository: Path) -> None:
    read = read_manifest(repository, 1)
    filled = {"files": read.files, "tokenizer_sha256": read.tokenizer_sha256}
    assert read == manifest().model_copy(update=filled)
    assert [file.path for file in read.files] == [f"encoder_{length}/model.onnx" for length in LENGTHS]
    assert len(read.tokenizer_sha256) == 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[1]", "another form: 'schema_version None'; limit: schema_version 2"),
        ('{"fingerprint": "of an older build"}', "schema_version None"),
        ('{"schema_version": 1}', "schema_version 1.*remove .*served.json"),
        ('{"schema_version": 2}', "model: .*Field required"),
    ],
)
def test_broken_manifest_refused_with_the_path_and_what_to_do(repository: Path, text: str, words: str) -> None:
    path = repository / "encode/1/manifest.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=words) as caught:
        read_manifest(repository, 1)
    assert str(path) in str(caught.value)
    assert "make build-engines" in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"output": {"name": "EMBEDDING", "size": 0}}, r"output\.size: 0: Input should be greater"),
        ({"enginee": "x"}, "enginee: 'x': Extra inputs"),
        ({"buckets": [{"length": 16, "index": -1, "batch": 8}]}, r"buckets\.0\.index: -1"),
        ({"engine": "torch"}, "engine: 'torch'"),
    ],
)
def test_wrong_fact_named_with_its_value(repository: Path, facts: dict[str, Any], words: str) -> None:
    rewrite(repository, **facts)
    with pytest.raises(ManifestError, match=words):
        read_manifest(repository, 1)


def test_versions_that_are_there_named_when_one_is_missing(repository: Path) -> None:
    (repository / "encode/010").mkdir()
    (repository / "encode/old").mkdir()
    assert published_versions(repository) == (1,)
    with pytest.raises(ManifestError, match="no such version: 2; limit: published: 1; to do: make build-engines"):
        read_manifest(repository, 2)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("encoder_32/1/model.onnx", "model.onnx of encoder_32 is not the file that was published"),
        ("encode/1/tokenizer.json", "tokenizer.json of encode is not the file that was published"),
    ],
)
def test_changed_file_found_by_its_hash(repository: Path, file: str, words: str) -> None:
    path = repository / file
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + b"?")
    check_complete(repository, 1, read_manifest(repository, 1))
    with pytest.raises(ManifestError, match=words):
        check_complete(repository, 1, read_manifest(repository, 1), hashes=True)


def test_shorter_file_found_without_hashes(repository: Path) -> None:
    path = repository / "encoder_16/1/model.onnx"
    path.unlink()
    path.write_bytes(b"cut")
    with pytest.raises(ManifestError, match="has 3 bytes, not 9"):
        check_complete(repository, 1, read_manifest(repository, 1))


@pytest.mark.parametrize(
    "facts",
    [
        {"output": Output(size=768)},
        {"output": Output(name="SCORES", size=4)},
        {"output": Output(size=4, labels=("spam", "ham"))},
        {"task": "classification"},
        {"requests": Requests(pair="optional")},
        {"requests": Requests(segment=True)},
    ],
)
def test_another_model_refused_as_a_version(facts: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="another model"):
        check_compatible(manifest(), manifest().model_copy(update=facts))


def test_version_of_the_same_form_accepted(repository: Path) -> None:
    accuracy = (Accuracy(metric="recall@1", reference=0.9, candidate=0.9, loss=0.0, limit=0.005),)
    other = manifest(lengths=(16, 512)).model_copy(update={"precision": "fp16", "accuracy": accuracy})
    check_compatible(manifest(), other)


def test_engine_that_runs_anywhere_fits_any_machine() -> None:
    check_fits(manifest(), Machine())


@pytest.mark.parametrize(
    "machine",
    [
        Machine(),
        H200.model_copy(update={"gpu": "NVIDIA L4"}),
        H200.model_copy(update={"compute_capability": "8.9"}),
        H200.model_copy(update={"tensorrt": "10.13.0"}),
        H200.model_copy(update={"tensorrt": None}),
    ],
    ids=["no GPU", "another GPU", "another capability", "another TensorRT", "no TensorRT"],
)
def test_plan_refused_with_both_fingerprints_when_made_for_another_machine(machine: Machine) -> None:
    made = manifest().model_copy(update={"engine": "tensorrt", "machine": H200})
    with pytest.raises(ManifestError) as caught:
        check_fits(made, machine)
    assert str(H200) in str(caught.value)
    assert str(machine) in str(caught.value)
    assert "make build-engines" in str(caught.value)


def test_plan_accepted_on_its_own_kind_of_machine() -> None:
    made = manifest().model_copy(update={"engine": "tensorrt", "machine": H200})
    check_fits(made, H200)
    # A package counts one number more than the library.
    check_fits(made, H200.model_copy(update={"tensorrt": "10.14.1.48"}))


def test_plan_without_a_machine_refused() -> None:
    with pytest.raises(ManifestError, match="no GPU, no TensorRT"):
        check_fits(manifest().model_copy(update={"engine": "tensorrt"}), Machine())


@pytest.mark.parametrize(("number", "text"), [(8601, "8.6.1"), (101401, "10.14.1"), (110100, "11.1.0")])
def test_library_version_read_in_both_ways_of_counting(number: int, text: str) -> None:
    assert release_of(number) == text
