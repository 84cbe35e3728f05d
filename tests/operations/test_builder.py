"""The builder's container: its root file system is read-only, so whatever a build writes must be on a volume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import build
from builders.command_options import cache_folder
from builders.settings import load_settings
from tests.operations.container import DOCKER, compose
from tests.operations.test_kubernetes import container_of, one
from tests.tools.repositories import ROOT


def written(config: str, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The folders that a build of a settings file writes to, below the project."""
    seen: list[Any] = []

    def stop(*arguments: Any) -> None:
        seen.extend(argument for argument in arguments if hasattr(argument, "reports"))
        raise InterruptedError

    settings, cache = load_settings(ROOT / config), cache_folder(ROOT / config, None)
    # No plan is compiled: its target would be asked of a GPU.
    monkeypatch.setattr(build, "target_of", lambda _: "tensorrt-rtx")
    monkeypatch.setattr(build, "make_engines", stop)
    monkeypatch.setattr(build, "find_version", lambda *_: None)
    with pytest.raises(InterruptedError):
        build.build(settings, cache, print, build.BuildOptions(gate=False))
    (work,) = seen
    return {path.resolve().relative_to(ROOT) for path in (settings.repository, work.cache, work.reports)}


def outside(folders: set[Path], mounts: list[str]) -> set[Path]:
    """Those that lie on none of the volumes."""
    there = [Path(mount).relative_to("/work") for mount in mounts if mount.startswith("/work/")]
    return {folder for folder in folders if not any(folder.is_relative_to(mount) for mount in there)}


@pytest.mark.parametrize("service", ["builder", "builder-cpu"])
def test_whatever_a_build_writes_is_on_a_volume_of_compose(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = compose()["services"][service]
    folders = written(definition["command"][-1], monkeypatch)
    assert len(folders) == 3
    mounts = [volume.split(":")[1] for volume in definition["volumes"] if not volume.endswith(":ro")]
    assert outside(folders, mounts) == set()
    # A new volume takes its owner from the image's folder.
    text = (DOCKER / "Dockerfile.builder").read_text(encoding="utf-8")
    made = {path for line in text.splitlines() if "mkdir -p " in line for path in line.split("mkdir -p ")[1].split()}
    assert {mount.removeprefix("/work/") for mount in mounts} <= made


@pytest.mark.parametrize("overlay", ["build", "cpu/build"])
def test_whatever_a_build_writes_is_on_a_volume_of_kubernetes(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container = container_of(one(overlay, "Job"))
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert outside(written(container["args"][-1], monkeypatch), mounts) == set()
