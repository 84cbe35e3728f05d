"""What this machine is to a TensorRT plan: the GPU, its compute capability and the TensorRT library."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from builders.manifest import Machine

_LIBRARIES = ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so.8")


def this_machine() -> Machine:
    """Ask the driver and the TensorRT library; what is not there is None. Nothing is imported or set up on the GPU."""
    gpu, capability = _gpu()
    return Machine(gpu=gpu, compute_capability=capability, tensorrt=_tensorrt())


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor, as the kernel names it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> tuple[str | None, str | None]:
    """Name and compute capability of the first GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, None
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    first = answer.strip().splitlines()[:1]
    if not first or "," not in first[0]:
        return None, None
    name, _, capability = first[0].rpartition(",")
    return name.strip(), capability.strip()


def _tensorrt() -> str | None:
    for name in _LIBRARIES:
        try:
            number: int = ctypes.CDLL(name).getInferLibVersion()
        except (OSError, AttributeError):
            continue
        return release_of(number)
    # Pip's TensorRT keeps its library where the loader does not look; its package says the version without loading it.
    for package in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def release_of(number: int) -> str:
    """`getInferLibVersion` as text: 8601 is 8.6.1; from TensorRT 10 on 101401 is 10.14.1."""
    if number < 10_000:
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
