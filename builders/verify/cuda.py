"""The lanes' CUDA driver for the gate: buffers that grow, errors as the gate's."""

from __future__ import annotations

from typing import Any

from builders.serving.lane import cuda as lane
from builders.serving.lane.cuda import CudaError
from builders.tensorrt.gpu import find_gpu
from builders.verify.runner import VerifyError


class Cuda(lane.Cuda):
    """The driver with one stream and buffers by name that grow and are kept.

    Args:
        number: of the GPU.

    Raises:
        VerifyError: no cuda-python, no driver or no such GPU.
    """

    def __init__(self, number: int = 0):
        """See the class."""
        driver = _driver()
        if find_gpu(number) is None:  # cuda-python says it in a traceback of its own
            raise VerifyError(
                "no NVIDIA GPU that the driver knows", value=number, remedy="run this on the machine of the plans"
            )
        self._buffers: dict[str, tuple[int, int]] = {}
        super().__init__(number, driver=driver)

    def call(self, name: str, *arguments: object) -> Any:
        """Call the driver; returns what it returns besides the code.

        Raises:
            VerifyError: the call failed; the message names it and the error.
        """
        try:
            return super().call(name, *arguments)
        except CudaError as error:
            raise VerifyError(
                f"CUDA: {name} failed",
                value=error.reason,
                remedy="look at nvidia-smi: a GPU with its driver, and memory free on it, are needed",
            ) from error

    def buffer(self, name: str, size: int) -> int:
        """Address of at least `size` bytes."""
        address, there = self._buffers.get(name, (0, 0))
        if there < size:
            if self._buffers.pop(name, None):
                self.free(address)
            address = self.allocate(size)
            self._buffers[name] = (address, size)
        return address

    def close(self) -> None:
        """Give everything back."""
        self.enter()
        for address, _ in self._buffers.values():
            self.free(address)
        self._buffers.clear()
        super().close()


def _driver() -> Any:
    try:
        return lane.find_driver()
    except CudaError as error:
        raise VerifyError(
            "cuda-python is not installed", remedy="pip install cuda-python (of the CUDA version that nvidia-smi shows)"
        ) from error
