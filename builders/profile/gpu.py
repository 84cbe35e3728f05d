"""How busy the GPU is, asked of NVML while a load runs; without a GPU nothing is known, which is no error."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_EVERY_S = 0.1


@dataclass(frozen=True)
class GpuUse:
    """Mean utilisation (share of 1; NVML's: the time in which any kernel ran) and peak memory in use, bytes."""

    utilization: float
    memory_bytes: int
    samples: int


class GpuSampler:
    """Samples while the block runs.

    Args:
        number: of the GPU.
    """

    def __init__(self, number: int = 0):
        """See the class."""
        self._number, self._stop = number, threading.Event()
        self._rows: list[tuple[int, int]] = []
        self._nvml = _nvml()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin."""
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._work, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def use(self) -> GpuUse | None:
        """What was seen; None without a GPU that NVML knows."""
        if not self._rows:
            return None
        mean = sum(row[0] for row in self._rows) / len(self._rows) / 100
        return GpuUse(mean, max(row[1] for row in self._rows), len(self._rows))

    def _work(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(self._number)
        except nvml.NVMLError:
            return
        while not self._stop.wait(_EVERY_S):
            used = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            self._rows.append((int(used), int(nvml.nvmlDeviceGetMemoryInfo(handle).used)))
        nvml.nvmlShutdown()


def _nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
