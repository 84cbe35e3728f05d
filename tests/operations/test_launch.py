"""The launcher's refusals and what it makes of a repository, without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders.serving.entry.backlog import METRICS_URL_VARIABLE
from tests.operations.container import DOCKER, script
from tests.tools.repositories import ROOT

launch, repository = script("launch"), script("repository")


def published(folder: Path, text: str = "", source: Path = ROOT / "model_repository") -> Path:
    """The checked-in configurations with an empty version of each."""
    for config in source.glob("*/config.pbtxt"):
        (folder / config.parent.name / "1").mkdir(parents=True)
        (folder / config.parent.name / "config.pbtxt").write_text(config.read_text("utf-8") + text, encoding="utf-8")
    return folder


def test_production_has_one_entry_with_eight_processes_and_native_lanes(tmp_path: Path) -> None:
    models = {model.name: model for model in repository.read_models(published(tmp_path))}
    assert [name for name, model in models.items() if model.is_entry] == ["encode"]
    assert {name: model.processes for name, model in models.items() if model.processes} == {"encode": 8}
    assert len(models) == 6


def test_a_model_without_a_version_is_not_loaded(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / "encoder_128" / "1").rmdir()
    assert "encoder_128" not in [model.name for model in repository.read_models(tmp_path)]


def test_an_instance_on_each_of_two_gpus_counts_twice(tmp_path: Path) -> None:
    folder = tmp_path / "lane"
    (folder / "1").mkdir(parents=True)
    text = 'name: "lane"\ninstance_group {\n  count: 3\n  gpus: 0\n  gpus: 1\n  kind: KIND_GPU\n}\nbackend: "python"\n'
    entry = 'parameters {\n  key: "entry"\n  value {\n    string_value: "{}"\n  }\n}\n'
    (folder / "config.pbtxt").write_text(text + entry, encoding="utf-8")
    assert repository.read_models(tmp_path) == [repository.Model("lane", True, 6)]


def test_an_ensemble_is_one_that_clients_call_and_its_queued_lane_is_not(tmp_path: Path) -> None:
    published(tmp_path)
    queue = 'backend: "python"\ndynamic_batching {\n  priority_levels: 2\n}\n'
    for name, text in {"ensemble_128": 'platform: "ensemble"\n', "encoder_128_queued": queue}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}"\n{text}', encoding="utf-8")
    assert [model.name for model in repository.read_models(tmp_path) if model.is_entry] == ["encode", "ensemble_128"]


def test_the_server_gets_a_stack_for_deep_json_and_the_address_of_its_metrics(tmp_path: Path) -> None:
    code = "import resource, launch; launch.raise_stack_limit(); print(*resource.getrlimit(resource.RLIMIT_STACK))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=DOCKER, check=True)
    soft, hard = map(int, run.stdout.split())
    assert soft == (512 << 20 if hard < 0 else min(hard, 512 << 20))
    # tritonserver takes both forms of a flag.
    arguments = [f"--model-repository={published(tmp_path)}", "--metrics-port", "9102"]
    launcher = launch.Launcher(arguments, ("control-key", "x" * 32), stop_on_dead_process=True)
    assert launcher.metrics_url == "http://127.0.0.1:9102/metrics"
    assert launch.METRICS_URL_VARIABLE == METRICS_URL_VARIABLE


@pytest.mark.parametrize(
    "given",
    ["--http-port=9000 --http-port=8100", "--http-port 9000 --http-port=8100", "--http-port=9000 --http-port 8100"],
)
def test_the_last_one_counts_when_a_flag_is_given_twice(given: str) -> None:
    assert launch._value([*given.split(), "--log-info=true"], "http-port") == "8100"
    assert launch._value(given.split(), "metrics-port") is None


def test_an_empty_repository_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(DOCKER / "launch.py"), f"--model-repository={tmp_path}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "holds no published version" in run.stderr
    assert "docker compose run --rm builder" in run.stderr


def test_too_little_shared_memory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    arguments = [
        f"--model-repository={published(tmp_path)}",
        "--backend-config=python,shm-default-byte-size=9999999999999",
    ]
    with pytest.raises(repository.LaunchError, match=r"8 model processes begin with .* Raise shm_size"):
        launch.Launcher(arguments, ("control-key", "x" * 32), stop_on_dead_process=True)


def test_every_published_model_is_loaded_and_the_dangerous_apis_are_closed(tmp_path: Path) -> None:
    launcher = launch.Launcher(
        [f"--model-repository={published(tmp_path)}"], ("control-key", "x" * 32), stop_on_dead_process=True
    )
    assert [flag for flag in launcher.command if flag.startswith("--load-model=")] == [
        f"--load-model={name}" for name in sorted(os.listdir(tmp_path))
    ]
    closed = "model-repository,shared-memory,trace,logging:control-key=" + "x" * 32
    assert f"--http-restricted-api={closed}" in launcher.command
    assert f"--grpc-restricted-protocol={closed}" in launcher.command


def test_without_a_key_file_the_apis_are_closed_with_a_key_that_nobody_knows() -> None:
    first, second = launch.read_key(None), launch.read_key("")
    assert first != second
    assert len(first[1]) == 64


@pytest.mark.parametrize(
    "text", ["", "nokey", "name=short", "na me=" + "x" * 32, "name=" + "a,b" * 16, "name=" + "a b" * 9]
)
def test_a_key_that_triton_would_misread_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(repository.LaunchError, match="NAME=VALUE") as caught:
        launch.read_key(str(path))
    assert not text or text not in str(caught.value)
