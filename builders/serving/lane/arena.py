"""The arena: all device memory of a lane in one allocation, made at start."""

from __future__ import annotations

import math

from .cuda import Cuda, CudaError
from .errors import EngineError

ALIGNMENT = 256
"""What TensorRT asks of the memory of a context, bytes, and a bound that every tensor may start at."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment, bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """One allocation that is handed out from its beginning; nothing is given back singly.

    Args:
        cuda: the driver.
        need: what will be taken, bytes.
        factor: the allocation is this many times the need.
        what: whose arena it is, for the message.

    Raises:
        EngineError: the GPU has not so much memory.
    """

    def __init__(self, cuda: Cuda, need: int, factor: float, what: str):
        """See the class."""
        self._cuda, self._what = cuda, what
        self.bytes = aligned(math.ceil(need * factor))
        """Size of the allocation, bytes."""
        self.used = 0
        """Bytes in use now."""
        self.peak = 0
        """Most bytes that were in use."""
        try:
            self._address: int | None = cuda.allocate(self.bytes)
        except CudaError as error:
            free, total = cuda.memory()
            raise EngineError(
                f"{what}: the GPU's memory does not hold the arena: {self.bytes} bytes, {factor:g} times the need of "
                f"{need}; limit: {free} bytes free of {total} ({error.reason}); to do: free memory on the GPU, or "
                "lower engine.max_batch_tokens or engine.arena_factor and build the engines again"
            ) from error

    def take(self, size: int) -> int:
        """Address of `size` bytes, aligned.

        Raises:
            EngineError: it is full.
        """
        size = aligned(size)
        if self._address is None or self.used + size > self.bytes:
            raise EngineError(
                f"{self._what}: the arena is full: {size} bytes more; limit: {self.bytes - self.used} of {self.bytes}; "
                "to do: raise engine.arena_factor"
            )
        address = self._address + self.used
        self.used += size
        self.peak = max(self.peak, self.used)
        return address

    def close(self) -> None:
        """Give the allocation back; a second call does nothing."""
        address, self._address = self._address, None
        if address is not None:
            self._cuda.free(address)
