"""The CUDA driver through cuda-python: one GPU, one stream, memory that is counted, every call checked.

Of the driver and not of the runtime: TensorRT and the driver share the GPU's primary context, and cuda-python alone is
needed.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# cuda-python 12.6 and newer, then older ones.
_DRIVERS = ("cuda.bindings.driver", "cuda.cuda")
_NOT_READY = 600
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: what other threads do meanwhile does not end a capture
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NAN = 0xFF
"""A byte; memory full of it is NaN in FP32, FP16 and BF16."""
_POLL_S = 30e-6
"""Between two looks at an event. The system makes about 0.1 ms of it, next to batches of 0.7 ms and more."""

#: Errors after which every further call on the context fails: of an address, an instruction, a launch, the hardware.
#: Source: the comments of CUresult in cuda.h ("leaves the process in an inconsistent state").
_FATAL = frozenset({201, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class CudaError(RuntimeError):
    """A call of the driver failed.

    Attributes:
        call: its name.
        reason: the name of the error, CUDA_ERROR_…
        fatal: nothing on this GPU can be done by this process any more.
    """

    def __init__(self, call: str, reason: str, *, fatal: bool = False):
        """See the class."""
        super().__init__(f"CUDA: {call} failed: {reason}")
        self.call, self.reason, self.fatal = call, reason, fatal


class CudaTimeoutError(CudaError):
    """The GPU did not finish in time; it may still be at work, so its buffers must not be used again."""

    def __init__(self, seconds: float):
        """See the class."""
        super().__init__("a batch", f"not done after {seconds:g} s", fatal=True)


class Cuda:
    """The driver with one GPU's primary context and one stream.

    Args:
        number: of the GPU.
        driver: cuda-python's driver module; left out, the installed one.

    Raises:
        CudaError: no cuda-python, no driver or no such GPU.
    """

    def __init__(self, number: int = 0, *, driver: Any = None):
        """See the class."""
        self._driver = find_driver() if driver is None else driver
        self._entered = threading.local()
        self._pinned: list[int] = []
        self._sealed = False
        self.allocations = 0
        """Allocations of device memory so far."""
        self.late_allocations = 0
        """Allocations of device memory since `seal`."""
        self.allocated_bytes = 0
        """Device memory held, bytes: what `allocate` gave and `free` did not take back."""
        self._sizes: dict[int, int] = {}
        try:
            self.call("cuInit", 0)
        except CudaError:
            raise
        except Exception as error:  # cuda-python's own, where there is no driver to load
            raise CudaError("cuInit", f"{type(error).__name__}: {error}") from error
        self._device = self.call("cuDeviceGet", number)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.enter()
        self.stream = self.call("cuStreamCreate", 0)

    def call(self, name: str, *arguments: object) -> Any:
        """Call the driver; returns what it returns besides the code.

        Raises:
            CudaError: the call failed.
        """
        code, *found = getattr(self._driver, name)(*arguments)
        if int(code) != 0:
            raise CudaError(name, getattr(code, "name", str(code)), fatal=int(code) in _FATAL)
        return found[0] if len(found) == 1 else tuple(found) or None

    def enum(self, name: str, value: int) -> Any:
        """A value of one of the driver's enumerations, which cuda-python does not take as a number."""
        return getattr(self._driver, name)(value)

    def enter(self) -> None:
        """Make the context the calling thread's; once a thread is enough, more do nothing."""
        if getattr(self._entered, "context", None) is not self._context:
            self.call("cuCtxSetCurrent", self._context)
            self._entered.context = self._context

    def memory(self) -> tuple[int, int]:
        """Free and total memory of the GPU, bytes."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, size: int) -> int:
        """Device memory of `size` bytes, aligned to 256 at least. The one place where it is taken, so that it counts.

        Raises:
            CudaError: there is not so much.
        """
        address = int(self.call("cuMemAlloc", max(1, size)))
        self.allocations += 1
        self.late_allocations += self._sealed
        self._sizes[address] = size
        self.allocated_bytes += size
        return address

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        self.call("cuMemFree", address)
        self.allocated_bytes -= self._sizes.pop(address, 0)

    def seal(self) -> None:
        """From now on allocations count as late: a lane that is ready takes no memory any more."""
        self._sealed = True

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Page-locked memory of the host, UINT8 [size], zeros; it lives until `close`."""
        address = int(self.call("cuMemHostAlloc", max(1, size), 0))
        self._pinned.append(address)
        memory: Any = (ctypes.c_uint8 * size).from_address(address)
        array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        array[:] = 0
        return array

    # ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy to the GPU, in the stream; the array must live until the stream is past it."""
        self.call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self.stream)

    def download(self, address: int, array: NDArray[Any]) -> None:
        """Copy from the GPU, in the stream; filled when the stream is past it."""
        self.call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self.stream)

    def upload_now(self, address: int, array: NDArray[Any]) -> None:
        """Copy to the GPU and wait for it."""
        self.call("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)

    def download_now(self, address: int, array: NDArray[Any]) -> None:
        """Copy from the GPU and wait for it."""
        self.call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)

    def spoil(self, address: int, size: int) -> None:
        """Fill with NaN, so that what a plan leaves unwritten is seen."""
        self.call("cuMemsetD8Async", address, _NAN, size, self.stream)

    def wait(self) -> None:
        """Until all of the stream is done."""
        self.call("cuStreamSynchronize", self.stream)

    def event(self, *, timing: bool = False) -> Any:
        """An event; `timing` for `elapsed_ms`."""
        return self.call("cuEventCreate", 0 if timing else _NO_TIMING)

    def record(self, event: Any) -> None:
        """Let the event be done when the stream has come here."""
        self.call("cuEventRecord", event, self.stream)

    def elapsed_ms(self, first: Any, last: Any) -> float:
        """Milliseconds between two events that are done."""
        return float(self.call("cuEventElapsedTime", first, last))

    def is_done(self, event: Any) -> bool:
        """Whether the stream is past the event.

        Raises:
            CudaError: what the stream did before it failed.
        """
        (code, *_) = self._driver.cuEventQuery(event)
        if int(code) == _NOT_READY:
            return False
        if int(code) != 0:
            raise CudaError("the batch", getattr(code, "name", str(code)), fatal=int(code) in _FATAL)
        return True

    def wait_for(self, event: Any, seconds: float) -> None:
        """Until the stream is past the event; looked at again and again, since a driver's own wait has no limit.

        Raises:
            CudaError: what the stream did before it failed.
            CudaTimeoutError: not within `seconds`.
        """
        limit = time.monotonic() + seconds
        while not self.is_done(event):
            if time.monotonic() > limit:
                raise CudaTimeoutError(seconds)
            time.sleep(_POLL_S)

    def capture(self, go: Callable[[], None]) -> Any:
        """What `go` puts into the stream, as a graph that is ready on the GPU.

        Raises:
            CudaError: it cannot be captured; the stream is usable again.
        """
        self.call("cuStreamBeginCapture", self.stream, self.enum("CUstreamCaptureMode", _RELAXED))
        try:
            go()
        finally:
            graph = self.call("cuStreamEndCapture", self.stream)
        made = self.call("cuGraphInstantiate", graph, 0)
        self.call("cuGraphDestroy", graph)
        self.call("cuGraphUpload", made, self.stream)
        return made

    def launch(self, graph: Any) -> None:
        """Put a captured graph into the stream."""
        self.call("cuGraphLaunch", graph, self.stream)

    def close(self) -> None:
        """Give back pinned memory, stream and context; device memory is the owners' to free before."""
        self.enter()
        for address in self._pinned:
            self.call("cuMemFreeHost", address)
        self._pinned.clear()
        self.call("cuStreamDestroy", self.stream)
        self.call("cuDevicePrimaryCtxRelease", self._device)


def find_driver() -> Any:
    """cuda-python's driver module.

    Raises:
        CudaError: it is not installed.
    """
    for name in _DRIVERS:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise CudaError("import", "cuda-python is not installed; to do: pip install cuda-python")
