"""What a server needs of its repository and its machine, checked before it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.errors import ServerError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where shm_open puts its files, not a temporary folder)


def check_models(repository: Path, models: Sequence[str]) -> None:
    """Make sure that each model has a configuration in the repository.

    Raises:
        ServerError: naming the models that are there.
    """
    if not repository.is_dir():
        raise ServerError("the model repository is no folder", value=str(repository), remedy="make render")
    there = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise ServerError("no model to load", limit=f"some of {', '.join(there) or 'none'}")
    for model in models:
        if model not in there:
            raise ServerError(
                f"no such model in {repository}", value=model, limit=f"one of {', '.join(there) or 'none'}"
            )


def check_shared_memory(repository: Path, models: Sequence[str], shm_bytes: int) -> None:
    """Make sure that /dev/shm can hold the regions of all Python model instances.

    Triton sizes them without reserving: where it is too small, a model process dies of SIGBUS under load, without a
    word in the log.

    Raises:
        ServerError: too little is free.
    """
    instances = sum(_python_instances(repository / model / "config.pbtxt") for model in models)
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, instances * shm_bytes
    if free < needed:
        raise ServerError(
            f"too little shared memory is free in {SHARED_MEMORY}",
            value=f"{free / 2**20:.0f} MiB",
            limit=f"at least {needed / 2**20:.0f} MiB for {instances} Python model instances",
            remedy="docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm, or fewer entry.processes",
        )


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is handed to this machine or container (a device file; no driver is asked)."""
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*"))


def large_pages(repository: Path, models: Sequence[str], base: Mapping[str, str]) -> dict[str, str]:
    """Variables that let the processes of CPU engines take their memory in large pages; empty where that is not so.

    ONNX Runtime walks through tens of MB of weights and activations for each batch, and misses address translations
    at 4 KiB a page: with `glibc.malloc.hugetlb=1` the same batches take 5 to 6 % less time (MiniLM, measured on one
    thread; `builders.bench` shows it). The kernel must allow it: /sys/kernel/mm/transparent_hugepage/enabled says
    `madvise` or `always`; elsewhere nothing changes.

    Args:
        repository: the model repository.
        models: what the server loads.
        base: the environment so far. A `GLIBC_TUNABLES` in it stays as it is, an empty one too: that turns this off.
    """
    if "GLIBC_TUNABLES" in base or _glibc() < (2, 35):
        return {}
    for model in models:
        config = _config(repository / model / "config.pbtxt")
        if config is not None and config.backend == "tensorrt":
            return {}
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _glibc() -> tuple[int, ...]:
    """Version of the C library, (0,) where it is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return (0,)
    return tuple(int(part) for part in version.split(".") if part.isdigit()) if name == "glibc" else (0,)


def entry_facts(repository: Path, model: str) -> dict[str, Any]:
    """What the configuration of an entry tells it (its parameter `entry`); empty for any other model."""
    config = _config(repository / model / "config.pbtxt")
    text = config.parameters["entry"].string_value if config is not None and "entry" in config.parameters else "{}"
    found: dict[str, Any] = json.loads(text)
    return found


def _config(path: Path) -> Any:
    """A model's configuration, or None where it cannot be parsed: Triton will say where."""
    # Here, not above: importing it costs half a second, and only a start needs it.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except text_format.ParseError:
        return None


def _python_instances(config: Path) -> int:
    model = _config(config)
    if model is None or model.backend != "python":
        return 0
    return sum(max(1, group.count) for group in model.instance_group) or 1
