"""A driver and a TensorRT that are none: the plan's "kernel" is numpy on the host's memory."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from builders.tensorrt.adapter import TensorRT

HIDDEN = 4


class FakeDriver:
    """The calls that the project makes; memory is the host's.

    `fail` names a call that fails, with `code`; `pending` is how often an event is asked before it is done (-1: never).
    """

    CUstreamCaptureMode = int

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.called: list[str] = []
        self.fail = ""
        self.code = 2
        self.pending = 0
        self.captured: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.called.append(name)
            if name == self.fail:
                return (_Code(self.code),)
            found = getattr(self, f"_{name}", lambda *_: None)(*arguments)
            if isinstance(found, tuple):
                return (_Code(0), *found)
            return (_Code(0),) if found is None else (_Code(0), found)

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _cuDeviceGet(self, number: int) -> int:  # noqa: N802
        return number

    def _cuDevicePrimaryCtxRetain(self, device: int) -> str:  # noqa: N802
        return f"context {device}"

    def _cuStreamCreate(self, flags: int) -> int:  # noqa: N802
        return 77

    def _cuMemAlloc(self, size: int) -> int:  # noqa: N802
        memory = (ctypes.c_char * size)()
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def _cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 1000, 4000

    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:  # noqa: N802
        self.called.append("cuEventQuery")
        if self.fail == "cuEventQuery":
            return (_Code(self.code),)
        if self.pending:
            self.pending -= 1
            return (_Code(600),)
        return (_Code(0),)

    def _cuMemHostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        return self._cuMemAlloc(size)

    def _cuMemFreeHost(self, address: int) -> None:  # noqa: N802
        self._cuMemFree(address)

    def _cuEventCreate(self, flags: int) -> int:  # noqa: N802
        return 5

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> None:  # noqa: N802
        self.captured = []

    def _cuStreamEndCapture(self, stream: int) -> Any:  # noqa: N802
        graph, self.captured = self.captured, None
        return graph

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> Any:  # noqa: N802
        return graph

    def _cuGraphLaunch(self, graph: Any, stream: int) -> None:  # noqa: N802
        for kernel in graph:
            kernel()

    def _cuMemFree(self, address: int) -> None:  # noqa: N802
        del self.memory[address]

    def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemcpyHtoD(self, to: int, source: int, size: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemcpyDtoH(self, to: int, source: int, size: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemsetD8Async(self, to: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memset(to, value, size)


class _Code(int):
    @property
    def name(self) -> str:
        return {2: "CUDA_ERROR_OUT_OF_MEMORY", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}.get(self, f"CUDA_ERROR_{int(self)}")


class FakeEngine:
    """A plan of profiles (length, batch): EMBEDDING is the sum of the real ids, block `layer.0` the ids in FP16."""

    #: What the context says that it needs, bytes.
    device_memory_size = 1000

    def __init__(
        self,
        profiles: list[tuple[int, int]],
        *,
        lazy: bool = False,
        segment: bool = False,
        driver: FakeDriver | None = None,
        outputs: tuple[str, ...] = ("EMBEDDING", "layer.0"),
    ):
        self.profiles, self.num_optimization_profiles, self.lazy = profiles, len(profiles), lazy
        self.driver, self.refuses = driver, False
        self.names = ["input_ids", "length", *(["segment_start"] if segment else []), *outputs]
        self.num_io_tensors = len(self.names)
        self.batches: list[tuple[int, int, int]] = []

    def get_tensor_name(self, place: int) -> str:
        return self.names[place]

    def get_tensor_dtype(self, name: str) -> str:
        return {"EMBEDDING": "DataType.FLOAT", "layer.0": "DataType.HALF"}.get(name, "DataType.INT32")

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in ("input_ids", "length", "segment_start") else "out"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        length, batch = self.profiles[profile]
        width = length if name == "input_ids" else 1
        return [(1, width), (batch, width), (batch, width)]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)

    def create_execution_context_without_device_memory(self) -> FakeContext:
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine):
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.device_memory = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        length, batch = self.engine.profiles[self.profile]
        self.shapes[name] = shape
        return shape[0] <= batch and shape[1] == (length if name == "input_ids" else 1)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        rows, length = self.shapes["input_ids"]
        return (rows, HIDDEN) if name == "EMBEDDING" else (rows, length, HIDDEN)

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.refuses:
            return False
        kernel = partial(self._kernel, dict(self.addresses), *self.shapes["input_ids"])
        driver = self.engine.driver
        if driver is not None and driver.captured is not None:
            driver.captured.append(kernel)
        else:
            kernel()
        return True

    def _kernel(self, addresses: dict[str, int], rows: int, width: int) -> None:
        self.engine.batches.append((self.profile, rows, width))
        if self.engine.lazy:
            return
        ids = _at(addresses["input_ids"], (rows, width), np.int32)
        length = _at(addresses["length"], (rows, 1), np.int32)
        real = np.where(np.arange(width) < length, ids, 0)
        if "segment_start" in addresses:
            start = _at(addresses["segment_start"], (rows, 1), np.int32)
            real = np.where(np.arange(width) < start, real, 10 * real)
        _at(addresses["EMBEDDING"], (rows, HIDDEN), np.float32)[:] = real.sum(1, keepdims=True)
        if "layer.0" in addresses:
            _at(addresses["layer.0"], (rows, width, HIDDEN), np.float16)[:] = ids[:, :, None]


def _at(address: int, shape: tuple[int, ...], kind: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)


def fake_tensorrt(engines: dict[bytes, FakeEngine]) -> TensorRT:
    """A TensorRT whose plans are the given bytes."""

    class Runtime:
        gpu_allocator: Any = None

        def __init__(self, logger: Any):
            self.logger = logger

        def deserialize_cuda_engine(self, content: bytes) -> FakeEngine | None:
            if content not in engines:
                self.logger.log(1, "engine plan file is not compatible")
            if self.gpu_allocator is not None:
                self.gpu_allocator.allocate(500, 256, 0)  # the weights
            return engines.get(content)

    class ILogger:
        pass

    class IGpuAllocator:
        pass

    modes = SimpleNamespace(INPUT="in", OUTPUT="out")
    return TensorRT(
        SimpleNamespace(
            __name__="tensorrt", __version__="8.6.0", Runtime=Runtime, ILogger=ILogger, IGpuAllocator=IGpuAllocator,
            TensorIOMode=modes,
        )
    )  # fmt: skip


def write_plans(folder: Path, engines: dict[bytes, FakeEngine]) -> list[Path]:
    paths = [folder / f"{number}.plan" for number in range(len(engines))]
    for path, content in zip(paths, engines, strict=True):
        path.write_bytes(content)
    return paths
