"""A version: complete or absent, whatever fails on the way; and what lies in it runs without the builders."""

from __future__ import annotations

import ast
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.bucket import Bucket, BucketPlan
from builders.errors import PublishError
from builders.publish import VersionParts, publish_version, read_manifest

LENGTHS = (16, 32, 64)
#: Moves of a first publication: every lane and the entry. A replacement first moves as many out of the way.
MOVES = len(LENGTHS) + 1
FAULTS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]


def plan(*lengths: int) -> BucketPlan:
    buckets = tuple(Bucket(length, index, "short", 8, (1, 8), False) for index, length in enumerate(lengths))
    return BucketPlan(buckets=buckets, max_tokens=lengths[-1], left_out=(), positions=lengths[-1])


def parts(folder: Path, mark: str = "new") -> VersionParts:
    """Small stand-ins whose content says which build they come from."""
    folder.mkdir(exist_ok=True)
    tokenizer, onnx = folder / "tokenizer.json", folder / "model.onnx"
    tokenizer.write_text(f"tokenizer {mark}")
    onnx.write_text(f"graph {mark}")
    return VersionParts(tokenizer, onnx, {"fingerprint": mark})


def contents(repository: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(repository)): file.read_bytes() for file in sorted(repository.rglob("*")) if file.is_file()
    }


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
    return list(repository.glob(".staging*"))


# A version that is published


def test_version_complete_when_published(tmp_path: Path) -> None:
    repository = tmp_path / "deep/repository"
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "made"))
    assert is_complete(repository, 1, "new")
    assert read_manifest(repository, 1) == {"fingerprint": "new"}
    assert not staging(repository)


def test_versions_stand_beside_each_other(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made", "old"))
    first = contents(tmp_path / "r")
    publish_version(tmp_path / "r", 2, plan(*LENGTHS), parts(tmp_path / "other", "new"))
    assert is_complete(tmp_path / "r", 2, "new")
    assert {name: data for name, data in contents(tmp_path / "r").items() if name in first} == first


def test_version_replaced_as_a_whole(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    leftover = repository / "encoder_16/1/lanes_lane/gone.py"
    leftover.write_text("")
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "new", "new"))
    assert is_complete(repository, 1, "new")
    assert not leftover.exists()
    assert not staging(repository)


def test_lane_of_a_bucket_that_is_gone_taken_out_of_the_replaced_version_only(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    for version in (1, 2):
        publish_version(repository, version, plan(16, 32, 64), parts(tmp_path / "old", "old"))
    publish_version(repository, 2, plan(16, 64), parts(tmp_path / "new", "new"))
    assert is_complete(repository, 2, "new", (16, 64))
    assert not (repository / "encoder_32/2").exists()
    assert is_complete(repository, 1, "old", (16, 32, 64))


def test_configurations_of_the_repository_untouched(tmp_path: Path) -> None:
    config = tmp_path / "r/encoder_16/config.pbtxt"
    config.parent.mkdir(parents=True)
    config.write_text("mine")
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made"))
    assert config.read_text() == "mine"


def test_folders_of_a_version_readable_by_the_server_user(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made"))
    umask = os.umask(0)
    os.umask(umask)
    for folder in (tmp_path / "r").rglob("*"):
        if folder.is_dir():
            assert folder.stat().st_mode & 0o777 == 0o777 & ~umask, folder


def test_graph_hard_linked_into_every_lane(tmp_path: Path) -> None:
    made = parts(tmp_path / "made")
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), made)
    files = [made.onnx, *(tmp_path / "r").glob("encoder_*/1/model.onnx")]
    assert len(files) == 1 + len(LENGTHS)
    assert len({file.stat().st_ino for file in files}) == 1


def test_graph_copied_when_the_file_system_has_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("builders.publish.os.link", link)
    made = parts(tmp_path / "made")
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), made)
    assert is_complete(tmp_path / "r", 1, "new")
    files = [made.onnx, *(tmp_path / "r").glob("encoder_*/1/model.onnx")]
    assert len({file.stat().st_ino for file in files}) == 1 + len(LENGTHS)


def test_no_manifest_when_no_version(tmp_path: Path) -> None:
    assert read_manifest(tmp_path, 1) is None


def test_no_manifest_when_it_is_broken(tmp_path: Path) -> None:
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made"))
    (tmp_path / "r/encode/1/manifest.json").write_text('{"fingerprint": ')
    assert read_manifest(tmp_path / "r", 1) is None


# A publication that fails


@pytest.mark.parametrize("fault", FAULTS, ids=["full disk", "interrupted"])
@pytest.mark.parametrize("move", range(MOVES))
def test_first_version_absent_when_a_move_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int, fault: BaseException
) -> None:
    repository = tmp_path / "r"
    made = fail_at(monkeypatch, move, fault)
    with pytest.raises((PublishError, KeyboardInterrupt)):
        publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "made"))
    assert made() > move  # what was moved before is moved back
    assert not (repository / "encode/1").exists()
    assert read_manifest(repository, 1) is None
    assert not staging(repository)


@pytest.mark.parametrize("fault", FAULTS, ids=["full disk", "interrupted"])
@pytest.mark.parametrize("move", range(2 * MOVES))
def test_replaced_version_complete_or_absent_when_a_move_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int, fault: BaseException
) -> None:
    repository = tmp_path / "r"
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    new = parts(tmp_path / "new", "new")
    with monkeypatch.context() as patch:
        made = fail_at(patch, move, fault)
        with pytest.raises((PublishError, KeyboardInterrupt)):
            publish_version(repository, 1, plan(*LENGTHS), new)
        assert made() >= move + 1
    if (repository / "encode/1").exists():
        assert is_complete(repository, 1, "old") or is_complete(repository, 1, "new")
    assert not staging(repository)


@pytest.mark.parametrize("move", range(MOVES))
def test_version_complete_when_published_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int
) -> None:
    repository = tmp_path / "r"
    with monkeypatch.context() as patch:
        fail_at(patch, move, FAULTS[0])
        with pytest.raises(PublishError):
            publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "made", "old"))
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "new", "new"))
    assert is_complete(repository, 1, "new")


@pytest.mark.parametrize("missing", ["model.onnx", "tokenizer.json"])
def test_repository_as_it_was_when_a_part_is_missing(tmp_path: Path, missing: str) -> None:
    repository = tmp_path / "r"
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    before = contents(repository)
    new = parts(tmp_path / "new")
    (tmp_path / "new" / missing).unlink()
    with pytest.raises(PublishError, match=missing):
        publish_version(repository, 1, plan(*LENGTHS), new)
    assert contents(repository) == before
    assert not staging(repository)


def test_failure_names_the_version_the_repository_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, 0, FAULTS[0])
    with pytest.raises(PublishError) as caught:
        publish_version(tmp_path / "r", 7, plan(*LENGTHS), parts(tmp_path / "made"))
    message = str(caught.value)
    assert f"version 7 could not be published into {tmp_path / 'r'}" in message
    assert "No space left on device" in message
    assert "to do: free some space" in message


@pytest.mark.parametrize("move", range(1, 2 * MOVES))
def test_replaced_version_as_it_was_when_one_move_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: int
) -> None:
    repository = tmp_path / "r"
    publish_version(repository, 1, plan(*LENGTHS), parts(tmp_path / "old", "old"))
    before = contents(repository)
    new = parts(tmp_path / "new", "new")
    made, real = 0, os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        nonlocal made
        made += 1
        if made == move + 1:
            raise FAULTS[0]
        real(source, target)

    monkeypatch.setattr("builders.publish.os.replace", replace)
    with pytest.raises(PublishError):
        publish_version(repository, 1, plan(*LENGTHS), new)
    assert contents(repository) == before


def test_other_model_with_a_like_name_kept(tmp_path: Path) -> None:
    other = tmp_path / "r/encoder_of_another_team/1/model.py"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made"))
    assert other.exists()


def test_repository_holds_nothing_but_models_while_a_version_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    real = os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        seen.update(path.name for path in (tmp_path / "r").iterdir())
        real(source, target)

    monkeypatch.setattr("builders.publish.os.replace", replace)
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), parts(tmp_path / "made"))
    assert seen <= {"encode", *(f"encoder_{length}" for length in LENGTHS)}


def test_external_weights_published_beside_the_graph(tmp_path: Path) -> None:
    made = parts(tmp_path / "made")
    (tmp_path / "made/model.onnx.data").write_text("weights")
    publish_version(tmp_path / "r", 1, plan(*LENGTHS), made)
    for length in LENGTHS:
        assert (tmp_path / f"r/encoder_{length}/1/model.onnx.data").read_text() == "weights"


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
    publish_version(tmp_path / "r", 1, plan(16), parts(tmp_path / "made"))
    files = sorted((tmp_path / "r").rglob("*.py"))
    assert len(files) >= 12
    for file in files:
        version = file.parent if file.name == "model.py" else file.parent.parent
        for level, module in imports_of(file):
            top = module.split(".")[0]
            assert top != "builders", f"{file} imports {module}"
            if level:
                assert level == 1, f"{file} reaches out of its package"
                assert (file.parent / f"{top}.py").is_file(), f"{file}: no {top} beside it"
            elif (version / top).is_dir():
                assert (version / Path(*module.split("."))).with_suffix(".py").is_file(), f"{file}: no {module}"
            else:
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{file} imports {module}"


@pytest.mark.parametrize(("model", "package"), [("encode", "lanes_entry"), ("encoder_16", "lanes_lane")])
def test_published_package_imported_alone_loads_no_builders(tmp_path: Path, model: str, package: str) -> None:
    publish_version(tmp_path / "r", 1, plan(16), parts(tmp_path / "made"))
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
    publish_version(tmp_path / "r", 1, plan(16), parts(tmp_path / "made"))
    assert not list((tmp_path / "r").rglob("__pycache__"))
    assert {str(file.relative_to(tmp_path / "r")) for file in (tmp_path / "r").rglob("model.py")} == {
        "encode/1/model.py",
        "encoder_16/1/model.py",
    }
