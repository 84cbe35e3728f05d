"""Name and compute capability of a GPU, from the driver itself: no package needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# CUdevice_attribute of cuda.h.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    """As the driver says it, e.g. `NVIDIA H200`."""
    compute_capability: tuple[int, int]
    """Major and minor; plans are tied to it."""

    def __str__(self) -> str:
        """Name and capability in one line."""
        return f"{self.name} (sm_{self.compute_capability[0]}{self.compute_capability[1]})"


def find_gpu(number: int = 0) -> Gpu | None:
    """The GPU of a number, or None where there is no driver or no such GPU."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    values = [ctypes.c_int(), ctypes.c_int()]
    calls: list[Callable[[], int]] = [
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), number),
        lambda: driver.cuDeviceGetName(name, len(name), device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(values[0]), _MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(values[1]), _MINOR, device),
    ]
    if any(call() != 0 for call in calls):  # stops at the first failure
        return None
    return Gpu(name.value.decode(), (values[0].value, values[1].value))
