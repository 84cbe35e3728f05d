"""The tritonserver inside the wheel nvidia-pytriton: where its parts are, and what the process needs around it.

The wheel carries tritonserver 2.51 and the Python backend, not a folder that `--backend-directory` could name, and
no libpython: `TritonInstall.lay_out` puts that folder together from links, `TritonInstall.environment` makes a model
see the packages of the running Python.

What a model's process ("stub") does with its surroundings, tried with 2.51:

* It embeds Python in isolated mode: PYTHONPATH, PYTHONHOME, PYTHONUTF8, PYTHONUNBUFFERED, the locale and the user's
  own site-packages (`pip install --user`) have no effect. A model names its encodings, and flushes what it prints.
* Python finds itself as the first `python3` of PATH: with the environment's `bin` first, `sys.prefix` is the
  environment and `sys.path` is: "" (the server's working folder), the standard library, the environment's
  site-packages (with its .pth files), the model's version folder, the model's folder, the backend's folder.
  So an installed package hides a module of the same name beside model.py.
* libpython has to be the one of the same Python: Debian's packages on pyenv's libpython failed to import numpy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builders.errors import ServerError

_INSTALL = "pip install 'encoder-lanes[serve]'"
_STUB = "triton_python_backend_stub"
_UTILS = "triton_python_backend_utils.py"
_BACKEND = "libtriton_python.so"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class RunFolder:
    """A folder laid out for one server by `TritonInstall.lay_out`.

    Attributes:
        backends: for `--backend-directory`; holds `python/`.
        libraries: holds a link to libpython alone, for LD_LIBRARY_PATH.
        work: empty, the server's working folder: it is first on the models' `sys.path`.
    """

    backends: Path
    libraries: Path
    work: Path


@dataclass(frozen=True)
class TritonInstall:
    """The parts of one installed wheel, for the running Python.

    Attributes:
        binary: the executable tritonserver.
        python_backend_folder: the wheel's folder with the Python backend's library.
        stub: the process that runs a model, built for the running Python's version.
        utils: triton_python_backend_utils.py.
        library_folder: the wheel's shared libraries.
        libpython: the shared library of the running Python, which the stub is linked to.
        python_folder: the folder of the running `python3`, inside the virtual environment if there is one.
    """

    binary: Path
    python_backend_folder: Path
    stub: Path
    utils: Path
    library_folder: Path
    libpython: Path
    python_folder: Path

    def lay_out(self, folder: Path) -> RunFolder:
        """Fill `folder` (existing, this server's own) with links to what the server loads.

        libpython gets a folder to itself: its real one is often the system's or conda's whole library folder, which
        must not come before what LD_LIBRARY_PATH already names.
        """
        run = RunFolder(backends=folder / "backends", libraries=folder / "lib", work=folder / "work")
        python = run.backends / "python"
        for made in (python, run.libraries, run.work):
            made.mkdir(parents=True, exist_ok=True)
        links = {
            python / _BACKEND: self.python_backend_folder / _BACKEND,
            python / _UTILS: self.utils,
            python / _STUB: self.stub,
            run.libraries / libpython_name(): self.libpython,
        }
        for link, target in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        return run

    def environment(self, run: RunFolder, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The server's environment: `base` (this process's own by default) with what tritonserver and its stubs need.

        One thread for each BLAS library unless `base` says otherwise: there are many model processes, and each would
        start a thread for every core.
        """
        values = dict(os.environ if base is None else base)
        libraries = [str(self.library_folder), str(run.libraries), *_path_list(values.get("LD_LIBRARY_PATH"))]
        values["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        values["PATH"] = os.pathsep.join([str(self.python_folder), *_path_list(values.get("PATH", os.defpath))])
        # The stubs ignore both (module docstring); a Python that a model starts does not.
        values["PYTHONUTF8"] = "1"
        if not any(values.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
            values["LC_ALL"] = "C.UTF-8"
        for name in _ONE_THREAD:
            values.setdefault(name, "1")
        return values


def locate_triton() -> TritonInstall:
    """Find the installed wheel and check that models can run beside it; imports neither pytriton nor numpy.

    Raises:
        ServerError: the wheel, its stub for this Python, libpython or numpy is missing, numpy is 2 or newer, or the
            packages are where a model would not see them.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("tritonserver is not installed: no wheel nvidia-pytriton", remedy=_INSTALL)
    package = Path(next(iter(spec.submodule_search_locations)))
    server = package / "tritonserver"
    backend = server / "backends" / "python"
    install = TritonInstall(
        binary=_present(server / "bin" / "tritonserver"),
        python_backend_folder=_present(backend / _BACKEND).parent,
        stub=_find_stub(server / "python_backend_stubs"),
        utils=_present(backend / _UTILS),
        library_folder=_present(package.parent / "nvidia_pytriton.libs"),
        libpython=find_libpython(),
        python_folder=_find_python_folder(),
    )
    check_numpy()
    return install


def python_version() -> str:
    """The running Python as the stubs are named, for example `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def libpython_name() -> str:
    """The name under which the stub asks for libpython, for example `libpython3.11.so.1.0`."""
    return f"libpython{python_version()}.so.1.0"


def find_libpython() -> Path:
    """The shared library of the running interpreter; in a virtual environment, that of its base.

    Raises:
        ServerError: there is none (Debian's python3.11 comes without; so does pyenv's default build).
    """
    name = libpython_name()
    folders = [
        *(str(value) for value in sysconfig.get_config_vars("LIBDIR", "LDLIBRARYDIR", "LIBPL") if value),
        *(str(Path(sys.base_prefix) / sub) for sub in ("lib", "lib64")),
    ]
    for folder in folders:
        if (found := Path(folder) / name).is_file():
            return found
    if found_by_linker := _linker_cache().get(name):
        return found_by_linker
    version = python_version()
    raise ServerError(
        "the models' processes cannot start: no shared library of the running Python",
        value=name,
        limit=f"looked in {', '.join(dict.fromkeys(folders))} and ldconfig -p",
        remedy=f"apt-get install libpython{version}"
        f" (with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version})",
    )


def check_numpy() -> None:
    """Refuse a numpy that the models must not, or could not, use.

    Raises:
        ServerError: numpy is missing, is 2 or newer, or lies outside the environment's site-packages.
    """
    try:
        numpy = importlib.metadata.distribution("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise ServerError("the models need numpy and it is not installed", remedy=_INSTALL) from None
    if int(numpy.version.partition(".")[0]) >= 2:
        # Not a matter of taste: pb_utils.Tensor() of this stub reads a numpy 2 array wrongly, without an error.
        raise ServerError(
            "Triton's Python backend hands over wrong data with this numpy",
            value=numpy.version,
            limit="numpy 1.x",
            remedy="pip install 'numpy<2'",
        )
    folder = Path(str(numpy.locate_file(""))).resolve()
    if folder not in {Path(path).resolve() for path in site.getsitepackages()}:
        raise ServerError(
            "the models would not see the installed packages",
            value=str(folder),
            limit=f"site-packages of {sys.prefix}; Triton's stub ignores PYTHONPATH and `pip install --user`",
            remedy=f"python3 -m venv .venv && .venv/bin/{_INSTALL}",
        )


def _find_stub(stubs: Path) -> Path:
    version = python_version()
    stub = stubs / version / _STUB
    if stub.is_file():
        return stub
    there = {path.parent.name for path in stubs.glob(f"*/{_STUB}")}
    available = sorted(there, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    raise ServerError(
        "the wheel nvidia-pytriton has no stub for this Python",
        value=version,
        limit=f"one of {', '.join(available) or 'none'}",
        remedy="make the virtual environment with one of these versions",
    )


def _find_python_folder() -> Path:
    # Not resolved: in a virtual environment the link's own folder is what leads Python to pyvenv.cfg.
    folder = Path(sys.executable).parent
    if not (folder / "python3").exists():
        raise ServerError(
            "the models' processes would start another Python: the running one has no python3 beside it",
            value=sys.executable,
            remedy=f"ln -s {Path(sys.executable).name} {folder / 'python3'}",
        )
    return folder


def _linker_cache() -> dict[str, Path]:
    """Shared libraries that the dynamic linker finds by itself, by name."""
    # sbin is not on an ordinary user's PATH.
    ldconfig = shutil.which("ldconfig", path=os.pathsep.join(["/sbin", "/usr/sbin", os.defpath]))
    if ldconfig is None:
        return {}
    listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
    return {name: Path(path) for name, path in re.findall(r"^\s*(\S+) \(.*\) => (\S+)$", listing, re.MULTILINE)}


def _present(path: Path) -> Path:
    if not path.exists():
        raise ServerError(
            "the wheel nvidia-pytriton is incomplete",
            value=str(path),
            limit="version 0.7.0 for Linux",
            remedy="pip install --force-reinstall nvidia-pytriton==0.7.0",
        )
    return path


def _path_list(value: str | None) -> list[str]:
    # An empty entry would mean the current folder.
    return [entry for entry in (value or "").split(os.pathsep) if entry]
