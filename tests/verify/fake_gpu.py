"""A driver and a TensorRT that are none: the plan's "kernel" is numpy on the host's memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from builders.tensorrt.adapter import TensorRT

HIDDEN = 4


class FakeDriver:
    """The calls that `builders.verify.cuda` makes; memory is the host's. `fail` names a call that fails."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.called: list[str] = []
        self.fail = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.called.append(name)
            if name == self.fail:
                return (_Code(2),)
            found = getattr(self, f"_{name}", lambda *_: None)(*arguments)
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

    def _cuMemFree(self, address: int) -> None:  # noqa: N802
        del self.memory[address]

    def _cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _cuMemsetD8Async(self, to: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        ctypes.memset(to, value, size)


class _Code(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


class FakeEngine:
    """A plan of profiles (length, batch): EMBEDDING is the sum of the real ids, block `layer.0` the ids in FP16."""

    def __init__(self, profiles: list[tuple[int, int]], *, lazy: bool = False, segment: bool = False):
        self.profiles, self.num_optimization_profiles, self.lazy = profiles, len(profiles), lazy
        self.names = ["input_ids", "length", *(["segment_start"] if segment else []), "EMBEDDING", "layer.0"]
        self.num_io_tensors = len(self.names)
        self.batches: list[tuple[int, int, int]] = []

    def get_tensor_name(self, place: int) -> str:
        return self.names[place]

    def get_tensor_dtype(self, name: str) -> str:
        return {"EMBEDDING": "DataType.FLOAT", "layer.0": "DataType.HALF"}[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        length, batch = self.profiles[profile]
        return [(1, length), (batch, length), (batch, length)]

    def create_execution_context(self) -> FakeContext:
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine):
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

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
        rows, width = self.shapes["input_ids"]
        self.engine.batches.append((self.profile, rows, width))
        if self.engine.lazy:
            return True
        ids, length = (self._at(name, self.shapes[name], np.int32) for name in ("input_ids", "length"))
        real = np.where(np.arange(width) < length, ids, 0)
        if "segment_start" in self.engine.names:
            real = np.where(np.arange(width) < self._at("segment_start", (rows, 1), np.int32), real, 10 * real)
        self._at("EMBEDDING", (rows, HIDDEN), np.float32)[:] = real.sum(1, keepdims=True)
        self._at("layer.0", (rows, width, HIDDEN), np.float16)[:] = ids[:, :, None]
        return True

    def _at(self, name: str, shape: tuple[int, ...], kind: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), kind).reshape(shape)


def fake_tensorrt(engines: dict[bytes, FakeEngine]) -> TensorRT:
    """A TensorRT whose plans are the given bytes."""

    class Runtime:
        def __init__(self, logger: Any):
            self.logger = logger

        def deserialize_cuda_engine(self, content: bytes) -> FakeEngine | None:
            if content not in engines:
                self.logger.log(1, "engine plan file is not compatible")
            return engines.get(content)

    class ILogger:
        pass

    return TensorRT(SimpleNamespace(__name__="tensorrt", __version__="8.6.0", Runtime=Runtime, ILogger=ILogger))


def write_plans(folder: Path, engines: dict[bytes, FakeEngine]) -> list[Path]:
    paths = [folder / f"{number}.plan" for number in range(len(engines))]
    for path, content in zip(paths, engines, strict=True):
        path.write_bytes(content)
    return paths
