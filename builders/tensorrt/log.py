"""What TensorRT says while it works: kept for the layer listing and for error messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt as trt

Steps = Callable[[str, int, int], None]
"""Told the name of a phase, the steps done and the steps in all."""


@dataclass
class BuildLog:
    """Messages of one build."""

    lines: list[str] = field(default_factory=list)
    """Verbose messages and information; the layer listing is among them."""
    warnings: list[str] = field(default_factory=list)
    """Warnings, in order."""
    errors: list[str] = field(default_factory=list)
    """Errors, in order; TensorRT returns None and says here why."""

    def add(self, severity: int, message: str) -> None:
        """Keep a message; severities as TensorRT's (0 internal error, 1 error, 2 warning, 3 info, 4 verbose)."""
        kept = self.errors if severity <= 1 else self.warnings if severity == 2 else self.lines
        kept.append(message)

    @property
    def reason(self) -> str:
        """The last errors in one line."""
        return " | ".join(message.strip() for message in self.errors[-3:]) or "TensorRT gave no reason"


def native_logger(module: Any, log: BuildLog) -> trt.ILogger:
    """A logger of `module` (tensorrt or tensorrt_rtx) that writes into `log`."""

    class _Logger(module.ILogger):  # type: ignore[misc]  # the base exists only once the module is loaded
        def __init__(self) -> None:
            module.ILogger.__init__(self)  # pybind11 wants it called by name

        def log(self, severity: Any, message: str) -> None:
            log.add(int(severity), message)

    logger: trt.ILogger = _Logger()
    return logger


def native_monitor(module: Any, steps: Steps) -> trt.IProgressMonitor:
    """A progress monitor of `module` that tells `steps`; TensorRT calls it from its own threads."""

    class _Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.totals[phase_name] = num_steps
            steps(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            # Steps count from 0. An exception must not cross into C++; False asks TensorRT to stop.
            try:
                steps(phase_name, step + 1, self.totals.get(phase_name, step + 1))
            except Exception:
                return False
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.totals.pop(phase_name, None)

    monitor: trt.IProgressMonitor = _Monitor()
    return monitor
