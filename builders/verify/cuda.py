"""The CUDA driver through cuda-python: one stream, buffers that grow, every call checked."""

from __future__ import annotations

import importlib
from typing import Any

from numpy.typing import NDArray

from builders.tensorrt.gpu import find_gpu
from builders.verify.runner import VerifyError

# cuda-python 12.6 and newer, then older ones.
_DRIVERS = ("cuda.bindings.driver", "cuda.cuda")
_NAN = 0xFF
"""A byte; memory full of it is NaN in FP32, FP16 and BF16."""


class Cuda:
    """The CUDA driver: one GPU's primary context, one stream, buffers by name that grow and are kept.

    Args:
        number: of the GPU.

    Raises:
        VerifyError: no cuda-python, no driver or no such GPU.
    """

    def __init__(self, number: int = 0):
        """See the class."""
        self._driver = _driver()
        if find_gpu(number) is None:  # cuda-python says it in a traceback of its own
            raise VerifyError(
                "no NVIDIA GPU that the driver knows", value=number, remedy="run this on the machine of the plans"
            )
        self._buffers: dict[str, tuple[int, int]] = {}
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", number)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.enter()
        self.stream = self.call("cuStreamCreate", 0)

    def call(self, name: str, *arguments: object) -> Any:
        """Call the driver; returns what it returns besides the code.

        Raises:
            VerifyError: the call failed; the message names it and the error.
        """
        code, *found = getattr(self._driver, name)(*arguments)
        if int(code) != 0:
            raise VerifyError(
                f"CUDA: {name} failed",
                value=getattr(code, "name", str(code)),
                remedy="look at nvidia-smi: a GPU with its driver, and memory free on it, are needed",
            )
        return found[0] if len(found) == 1 else tuple(found) or None

    def enum(self, name: str, value: int) -> Any:
        """A value of one of the driver's enumerations, which cuda-python does not take as a number."""
        return getattr(self._driver, name)(value)

    def enter(self) -> None:
        """Make the context the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    def buffer(self, name: str, size: int) -> int:
        """Address of at least `size` bytes."""
        address, there = self._buffers.get(name, (0, 0))
        if there < size:
            if self._buffers.pop(name, None):
                self.call("cuMemFree", address)
            address = int(self.call("cuMemAlloc", size))
            self._buffers[name] = (address, size)
        return address

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy to the GPU; the array must live until `wait`."""
        self.call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self.stream)

    def download(self, address: int, array: NDArray[Any]) -> None:
        """Copy from the GPU; filled after `wait`."""
        self.call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self.stream)

    def spoil(self, address: int, size: int) -> None:
        """Fill with NaN, so that what a plan leaves unwritten is seen."""
        self.call("cuMemsetD8Async", address, _NAN, size, self.stream)

    def wait(self) -> None:
        """Until all of the above is done."""
        self.call("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give everything back."""
        self.enter()
        for address, _ in self._buffers.values():
            self.call("cuMemFree", address)
        self._buffers.clear()
        self.call("cuStreamDestroy", self.stream)
        self.call("cuDevicePrimaryCtxRelease", self._device)


def _driver() -> Any:
    for name in _DRIVERS:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise VerifyError(
        "cuda-python is not installed", remedy="pip install cuda-python (of the CUDA version that nvidia-smi shows)"
    )
