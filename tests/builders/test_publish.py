"""A version: complete or absent, whatever fails on the way; and what lies in it runs without the builders."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builders.bucket import Bucket, BucketPlan
from builders.errors import ManifestError, PublishError
from builders.manifest import Manifest, Output, built_buckets, check_complete, read_manifest
from builders.publish import VersionParts, find_version, publish_version, sweep

LENGTHS = (16, 32, 64)
#: Moves of a publication: every lane and the entry.
MOVES = len(LENGTHS) + 1
FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.publish._sync_file", lambda path: None)


def plan(*lengths: int) -> BucketPlan:
    buckets = tuple(Bucket(length, index, "short", 8, (1, 8), False) for index, length in enumerate(lengths))
    return BucketPlan(buckets=buckets, max_tokens=lengths[-1], left_out=(), positions=lengths[-1])


def manifest(mark: str = "new", lengths: tuple[int, ...] = LENGTHS) -> Manifest:
    return Manifest(
        model="made up",
        model_sha256="0",
        output=Output(size=4),
        engine="onnxruntime",
        precision="fp32",
        buckets=built_buckets(plan(*lengths).buckets),
        max_tokens=lengths[-1],
        positions=lengths[-1],
        pad_id=0,
        serving_sha256="0",
        graph_sha256="0",
        date="2026-01-01T00:00:00+00:00",
        fingerprint=mark,
    )


def parts(folder: Path, mark: str = "new", lengths: tuple[int, ...] = LENGTHS) -> VersionParts:
    """Small stand-ins whose content says which build they come from."""
    folder.mkdir(exist_ok=True)
    tokenizer, onnx = folder / "tokenizer.json", folder / "model.onnx"
    tokenizer.write_text(f"tokenizer {mark}")
    onnx.write_text(f"graph {mark}")
    return VersionParts(tokenizer, onnx, manifest(mark, lengths))


def contents(repository: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(repository)): file.read_bytes() for file in sorted(repository.rglob("*")) if file.is_file()
    }


def tree(repository: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, and every folder."""
    found = sorted(repository.rglob("*"))
    return {str(path.relative_to(repository)): path.read_bytes() if path.is_file() else None for path in found}


def is_complete(repository: Path, version: int, mark: str, lengths: tuple[int, ...] = LENGTHS) -> bool:
    entry = repository / "encode" / str(version)
    lanes = [repository / f"encoder_{length}" / str(version) for length in lengths]
    needed = [
        entry / name for name in ("manifest.json", "model.py", "lanes_entry/__init__.py", "lanes_entry/dispatch.py")
    ]
    needed += [
        lane / name for lane in lanes for name in ("model.py", "lanes_lane/__init__.py", "lanes_lane/onnx_engine.py")
    ]
    return (
        all(file.is_file() for file in needed)
        and json.loads((entry / "manifest.json").read_text())["fingerprint"] == mark
        and (entry / "tokenizer.json").read_text() == f"tokenizer {mark}"
        and all((lane / "model.onnx").read_text() == f"graph {mark}" for lane in lanes)
    )


def fail_at(monkeypatch: pytest.MonkeyPatch, move: int, fault: BaseException) -> Callable[[], int]:
    """Let the move with this number (from 0) fail, and every later one too, as on a full disk."""
    made, real = 0, os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        nonlocal made
        made += 1
        if made > move:
            raise fault
        real(source, target)

    monkeypatch.setattr("builders.publish.os.replace", replace)
    return lambda: made


def staging(repository: Path) -> list[Path]:
    return list(repository.rglob(".staging*"))


# A version that is published


def test_version_complete_when_published(tmp_path: Path) -> None:
    repository = tmp_path / "deep/repository"
    assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / "made")) == 1
    assert is_complete(repository, 1, "new")
    assert read_manifest(repository, 1).fingerprint == "new"
    check_complete(repository, 1, read_manifest(repository, 1), hashes=True)
    assert not staging(repository)


def test_ensembles_published_with_the_version_and_their_numbers_never_used_again(tmp_path: Path) -> None:
    made = parts(tmp_path / "parts")
    with_one = replace(made, manifest=made.manifest.model_copy(update={"ensembles": (32,)}))
    repository = tmp_path / "repository"
    assert publish_version(repository, plan(*LENGTHS), with_one) == 1
    assert sorted(path.name for path in (repository / "tokenize_32/1").iterdir() if path.name != "__pycache__") == [
        "lanes_ensemble", "lanes_entry", "model.py", "tokenizer.json",
    ]  # fmt: skip
    assert list((repository / "ensemble_32/1").iterdir()) == []
    engines = [repository / f"{model}/1/model.onnx" for model in ("encoder_32", "encoder_32_queued")]
    assert engines[0].stat().st_ino == engines[1].stat().st_ino
    assert (repository / "encoder_32_queued/1/lanes_lane/model.py").is_file()
    check_complete(repository, 1, read_manifest(repository, 1), hashes=True)
    for path in ("tokenize_32/1/tokenizer.json", "encoder_32_queued/1/model.py", "ensemble_32/1"):
        hidden = tmp_path / "hidden"
        (repository / path).rename(hidden)
        with pytest.raises(ManifestError, match=f"{path} is missing"):
            check_complete(repository, 1, read_manifest(repository, 1))
        hidden.rename(repository / path)
    (repository / "tokenize_32/7").mkdir()
    assert publish_version(repository, plan(*LENGTHS), made) == 8


@pytest.mark.parametrize("number", range(1, 8))
def test_repository_as_it_was_when_a_move_of_an_ensemble_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = parts(tmp_path / "parts")
    with_one = replace(made, manifest=made.manifest.model_copy(update={"ensembles": (32,)}))
    moves, move = 0, os.replace

    def failing(source: Path, target: Path) -> None:
        nonlocal moves
        moves += 1
        if moves == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        move(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PublishError):
        publish_version(tmp_path / "repository", plan(*LENGTHS), with_one)
    assert list((tmp_path / "repository").iterdir()) == []


def test_next_version_published_beside_the_others_which_are_not_touched(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    publish_version(repository, plan(*LENGTHS), parts(tmp_path / "made", "old"))
    first = contents(repository)
    assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / "other", "new")) == 2
    assert is_complete(repository, 2, "new")
    assert {name: data for name, data in contents(repository).items() if name in first} == first


@pytest.mark.parametrize("taken", ["encode/4", "encoder_16/4", "encoder_2048/4"])
def test_number_that_any_folder_of_the_model_has_never_used_again(tmp_path: Path, taken: str) -> None:
    (tmp_path / "r" / taken).mkdir(parents=True)
    (tmp_path / "r/encode/007").mkdir(parents=True)
    assert publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made")) == 5


def test_configurations_of_the_repository_untouched(tmp_path: Path) -> None:
    config = tmp_path / "r/encoder_16/config.pbtxt"
    config.parent.mkdir(parents=True)
    config.write_text("mine")
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    assert config.read_text() == "mine"


def test_folders_of_a_version_readable_by_the_server_user(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    umask = os.umask(0)
    os.umask(umask)
    for folder in (tmp_path / "r").rglob("*"):
        if folder.is_dir():
            assert folder.stat().st_mode & 0o777 == 0o777 & ~umask, folder


def test_graph_is_one_file_of_all_lanes_and_of_nothing_else(tmp_path: Path) -> None:
    # Triton takes another name of a file for a change of it: the cache and other repositories must not share it.
    made = parts(tmp_path / "made")
    for repository in ("r", "other"):
        publish_version(tmp_path / repository, plan(*LENGTHS), made)
        files = list((tmp_path / repository).glob("encoder_*/1/model.onnx"))
        assert len(files) == files[0].stat().st_nlink == len(LENGTHS)
        assert len({file.stat().st_ino for file in files}) == 1
    assert (tmp_path / "made/model.onnx").stat().st_nlink == 1


def test_graph_copied_when_the_file_system_has_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("builders.publish.os.link", link)
    made = parts(tmp_path / "made")
    publish_version(tmp_path / "r", plan(*LENGTHS), made)
    assert is_complete(tmp_path / "r", 1, "new")
    files = [tmp_path / "made/model.onnx", *(tmp_path / "r").glob("encoder_*/1/model.onnx")]
    assert len({file.stat().st_ino for file in files}) == 1 + len(LENGTHS)


def test_plan_of_its_own_published_into_each_lane_when_there_is_one_per_bucket(tmp_path: Path) -> None:
    made = parts(tmp_path / "made")
    plans = {f"encoder_{length}": tmp_path / f"{length}.plan" for length in LENGTHS}
    for model, file in plans.items():
        file.write_text(f"plan of {model}")
    publish_version(tmp_path / "r", plan(*LENGTHS), replace(made, engine=plans))
    for model in plans:
        folder = tmp_path / "r" / model / "1"
        assert (folder / "model.plan").read_text() == f"plan of {model}"
        # The Python engine can serve it too: which backend does is a setting.
        assert {path.name for path in (folder / "lanes_lane").iterdir()} >= {"tensorrt_engine.py", "spans.py"}
    assert len({file.sha256 for file in read_manifest(tmp_path / "r", 1).files}) == len(LENGTHS)


def test_external_weights_published_beside_the_graph_and_hashed(tmp_path: Path) -> None:
    made = parts(tmp_path / "made")
    (tmp_path / "made/model.onnx.data").write_text("weights")
    publish_version(tmp_path / "r", plan(*LENGTHS), made)
    for length in LENGTHS:
        assert (tmp_path / f"r/encoder_{length}/1/model.onnx.data").read_text() == "weights"
    listed = {file.path: file for file in read_manifest(tmp_path / "r", 1).files}
    assert listed["encoder_16/model.onnx.data"].bytes == len("weights")


def test_repository_holds_nothing_but_models_while_a_version_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    real = os.replace

    def move(source: str | Path, target: str | Path) -> None:
        seen.update(path.name for path in (tmp_path / "r").iterdir())
        real(source, target)

    monkeypatch.setattr("builders.publish.os.replace", move)
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    assert seen <= {"encode", *(f"encoder_{length}" for length in LENGTHS)}


# A version that is there already


def test_version_found_by_its_fingerprint_the_newest_first(tmp_path: Path) -> None:
    for mark in ("a", "b", "a"):
        publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / mark, mark))
    assert [find_version(tmp_path / "r", mark) for mark in ("a", "b", "c")] == [3, 2, None]


@pytest.mark.parametrize("missing", ["encode/1/manifest.json", "encode/1/model.py", "encoder_32/1", "encode/1"])
def test_version_not_found_when_a_part_is_missing(tmp_path: Path, missing: str) -> None:
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    path = tmp_path / "r" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert find_version(tmp_path / "r", "new") is None


def test_nothing_found_when_there_is_no_repository(tmp_path: Path) -> None:
    assert find_version(tmp_path / "r", "new") is None


# A publication that fails


@pytest.mark.parametrize("fault", FAULTS, ids=["full disk", "interrupted"])
@pytest.mark.parametrize("move", range(MOVES))
@pytest.mark.parametrize("before", [0, 1])
def test_repository_as_it_was_when_a_move_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int, fault: BaseException, before: int
) -> None:
    repository = tmp_path / "r"
    repository.mkdir()
    for _ in range(before):
        publish_version(repository, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    there = tree(repository)
    with monkeypatch.context() as patch:
        made = fail_at(patch, move, fault)
        with pytest.raises((PublishError, KeyboardInterrupt)):
            publish_version(repository, plan(*LENGTHS), parts(tmp_path / "made"))
        assert made() == move + 1
    assert tree(repository) == there
    assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / "new", "new")) == before + 1
    assert is_complete(repository, before + 1, "new")


@pytest.mark.parametrize("missing", ["model.onnx", "tokenizer.json"])
def test_repository_as_it_was_when_a_part_is_missing(tmp_path: Path, missing: str) -> None:
    repository = tmp_path / "r"
    publish_version(repository, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    before = tree(repository)
    new = parts(tmp_path / "new")
    (tmp_path / "new" / missing).unlink()
    with pytest.raises(PublishError, match=missing):
        publish_version(repository, plan(*LENGTHS), new)
    assert tree(repository) == before


def test_failure_names_the_repository_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 0, FAULTS[0])
    with pytest.raises(PublishError) as caught:
        publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made"))
    message = str(caught.value)
    assert f"a version could not be published into {tmp_path / 'r'}; it is as it was" in message
    assert "No space left on device" in message
    assert "to do: free some space" in message


def test_lanes_that_no_publication_left_kept_when_the_repository_is_swept(tmp_path: Path) -> None:
    # Somebody moved encode/1 away to take a version out of service: its lanes are not ours to remove.
    publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "made", "old"))
    (tmp_path / "r/encode/1").rename(tmp_path / "kept")
    other = tmp_path / "r/encoder_of_another_team/1/model.py"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    assert sweep(tmp_path / "r") == []
    assert publish_version(tmp_path / "r", plan(*LENGTHS), parts(tmp_path / "other")) == 2
    (tmp_path / "kept").rename(tmp_path / "r/encode/1")
    assert is_complete(tmp_path / "r", 1, "old")
    assert other.exists()


# What is published runs without the builders

#: What a stock Triton container with README's three packages has, beside Python itself.
ALLOWED = {"numpy", "onnxruntime", "tokenizers", "triton_python_backend_utils"}


def imports_of(file: Path) -> list[tuple[int, str]]:
    """(level, module) of every import statement, also of those inside functions."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
    return found


def test_published_files_import_only_themselves_and_the_serving_packages(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", plan(16), parts(tmp_path / "made", lengths=(16,)))
    files = sorted((tmp_path / "r").rglob("*.py"))
    assert len(files) >= 12
    for file in files:
        version = tmp_path / "r" / Path(*file.relative_to(tmp_path / "r").parts[:2])
        for level, module in imports_of(file):
            top = module.split(".")[0]
            assert top != "builders", f"{file} imports {module}"
            if level:
                place = file.parents[level - 1]
                assert version in place.parents, f"{file} reaches out of its package"
                assert (place / f"{top}.py").is_file() or (place / top).is_dir(), f"{file}: no {top} beside it"
            elif (version / top).is_dir():
                named = version / Path(*module.split("."))
                assert named.with_suffix(".py").is_file() or named.is_dir(), f"{file}: no {module}"
            else:
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{file} imports {module}"


@pytest.mark.parametrize(("model", "package"), [("encode", "lanes_entry"), ("encoder_16", "lanes_lane")])
def test_published_package_imported_alone_loads_no_builders(tmp_path: Path, model: str, package: str) -> None:
    publish_version(tmp_path / "r", plan(16), parts(tmp_path / "made", lengths=(16,)))
    version = tmp_path / "r" / model / "1"
    names = [f"{package}.{file.stem}" for file in sorted((version / package).glob("*.py")) if file.stem != "__init__"]
    assert len(names) >= 3
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(version)!r})\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'builders'])\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_no_bytecode_and_no_second_model_py_published(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", plan(16), parts(tmp_path / "made", lengths=(16,)))
    # A file of that name: Python cannot write bytecode there, which would change the version in Triton's eyes.
    assert all(path.is_file() and not path.read_bytes() for path in (tmp_path / "r").rglob("__pycache__"))
    assert {str(file.relative_to(tmp_path / "r")) for file in (tmp_path / "r").rglob("model.py")} == {
        "encode/1/model.py",
        "encoder_16/1/model.py",
    }
