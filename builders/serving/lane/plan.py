"""A compiled plan, its one profile and its execution context, for TensorRT 8.6 and newer alike."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .cuda import Cuda, CudaError
from .errors import EngineError
from .staging import TensorSpec

_TYPES: dict[str, Any] = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32}
_WARNING = 2  # ILogger.Severity: internal error, error, warning, information, verbose


class Plan:
    """A plan file on the GPU and an execution context of one of its profiles, which owns no memory for activations.

    TensorRT's own allocations (the weights, when the plan is loaded) go through `Cuda.allocate`, too, and count.

    Args:
        path: model.plan.
        cuda: the driver; its stream is the one that everything runs on.
        profile: number of the optimisation profile.
        length: the bucket, tokens; the profile must be for it.
        module: the module `tensorrt`; left out, the installed one.
        native_allocations: count TensorRT's own allocations; it costs a call into Python for each.

    Raises:
        EngineError: TensorRT is missing, or the plan is not for it, for this GPU or for this bucket.
    """

    def __init__(
        self, path: Path, cuda: Cuda, *, profile: int, length: int, module: Any = None, native_allocations: bool = True
    ):
        """See the class."""
        self.name = f"{path.parent.parent.name}/{path.name}"
        self._trt = module if module is not None else _tensorrt()
        self._cuda, self._profile = cuda, profile
        self._log: list[str] = []
        # Kept: TensorRT holds bare pointers to both.
        self._logger = _logger(self._trt, self._log)
        self._allocator = _allocator(self._trt, cuda) if native_allocations else None
        self._runtime = self._trt.Runtime(self._logger)
        if self._allocator is not None:
            self._runtime.gpu_allocator = self._allocator
        try:
            content = path.read_bytes()
        except OSError as error:
            raise EngineError(
                f"{self.name} cannot be read: {error.strerror}; to do: build the engines again"
            ) from error
        self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(
                f"TensorRT {self._trt.__version__} does not take {self.name}: {self.reason}; to do: free memory on the "
                "GPU, or compile the plan on this machine with this TensorRT"
            )
        self._check_profile(length)
        self.inputs = self._specs(self._trt.TensorIOMode.INPUT)
        """Input tensors, as rows."""
        self._context = self._make_context()
        if profile:
            self._need(self._context.set_optimization_profile_async(profile, int(cuda.stream)), f"profile {profile}")
            cuda.wait()
        self.outputs = self._output_specs(length)
        """Output tensors, as rows."""
        self._bound: dict[str, int] | None = None

    @property
    def reason(self) -> str:
        """The last errors that TensorRT told."""
        return "; ".join(self._log[-3:]) or "it gives no reason"

    @property
    def batch(self) -> int:
        """Largest batch of the profile, rows."""
        return int(self._shapes("input_ids")[2][0])

    @property
    def activation_bytes(self) -> int:
        """Memory that the context needs for this profile; below TensorRT 10 it is told for the largest profile only."""
        for name in ("get_device_memory_size_for_profile_v2", "get_device_memory_size_for_profile"):
            if hasattr(self._engine, name):
                return int(getattr(self._engine, name)(self._profile))
        return int(self._engine.device_memory_size)

    def give_memory(self, address: int, size: int) -> None:
        """Let the context compute in this memory: `activation_bytes` at least, aligned to 256."""
        if hasattr(self._context, "set_device_memory"):
            self._context.set_device_memory(address, size)
        else:
            self._context.device_memory = address

    def bind(self, rows: int, addresses: dict[str, int]) -> None:
        """Set the batch and where its tensors lie; nothing is done where they are set already.

        Raises:
            EngineError: the plan refuses them.
        """
        wanted = {**addresses, "rows": rows}
        if wanted == self._bound:
            return
        self._bound = None
        for spec in self.inputs:
            self._need(self._context.set_input_shape(spec.name, (rows, *spec.row)), f"{rows} rows of {spec.name}")
        for name, address in addresses.items():
            self._need(self._context.set_tensor_address(name, address), f"an address of {name}")
        self._bound = wanted

    def enqueue(self) -> None:
        """Put the batch that is bound into the stream.

        Raises:
            EngineError: the launch failed.
        """
        self._need(self._context.execute_async_v3(int(self._cuda.stream)), "the batch")

    def close(self) -> None:
        """Let go in TensorRT's order: a context before its engine, an engine before its runtime."""
        self._context = None
        self._engine = None
        self._runtime = None

    def _check_profile(self, length: int) -> None:
        count = int(self._engine.num_optimization_profiles)
        if not 0 <= self._profile < count:
            raise EngineError(
                f"{self.name} has no profile {self._profile}; limit: 0 to {count - 1}; to do: render again"
            )
        names = [self._engine.get_tensor_name(place) for place in range(self._engine.num_io_tensors)]
        if not {"input_ids", "length"} <= set(names):
            raise EngineError(
                f"{self.name} has not the lanes' contract: its tensors are {', '.join(names)}; limit: input_ids and "
                "length among them; to do: build the engines again"
            )
        least, _, most = self._shapes("input_ids")
        if not least[1] <= length <= most[1]:
            raise EngineError(
                f"profile {self._profile} of {self.name} is not for this bucket: {length} tokens; limit: {least[1]} to "
                f"{most[1]}; to do: render again, with the settings that the engines were built with"
            )

    def _shapes(self, name: str) -> list[tuple[int, ...]]:
        """Least, best and largest shape of an input in this profile."""
        get = getattr(self._engine, "get_tensor_profile_shape", None)
        shapes = get(name, self._profile) if get else self._engine.get_profile_shape(self._profile, name)
        return [tuple(int(size) for size in shape) for shape in shapes]

    def _specs(self, mode: Any) -> tuple[TensorSpec, ...]:
        names = [self._engine.get_tensor_name(place) for place in range(self._engine.num_io_tensors)]
        found = []
        for name in names:
            if self._engine.get_tensor_mode(name) != mode:
                continue
            row = self._shapes(name)[2][1:] if mode == self._trt.TensorIOMode.INPUT else ()
            found.append(TensorSpec(name, self._type(name), row))
        return tuple(found)

    def _output_specs(self, length: int) -> tuple[TensorSpec, ...]:
        """Outputs get their shape from the inputs': asked with a batch of one row."""
        for spec in self.inputs:
            self._need(self._context.set_input_shape(spec.name, (1, *spec.row)), f"1 row of {spec.name}")
        outputs = []
        for spec in self._specs(self._trt.TensorIOMode.OUTPUT):
            shape = tuple(int(size) for size in self._context.get_tensor_shape(spec.name))
            if min(shape, default=0) < 0 or shape[:1] != (1,):
                raise EngineError(
                    f"the shape of output {spec.name} of {self.name} is not known from the batch: {shape}; limit: "
                    f"[batch, …] at {length} tokens; to do: build the engines again"
                )
            outputs.append(TensorSpec(spec.name, spec.dtype, shape[1:]))
        return tuple(outputs)

    def _type(self, name: str) -> Any:
        kind = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
        if kind not in _TYPES:
            raise EngineError(
                f"tensor {name} of {self.name} has a type that is not served: {kind}; limit: {', '.join(_TYPES)}; "
                "to do: build the engines again"
            )
        return _TYPES[kind]

    def _make_context(self) -> Any:
        strategy = getattr(self._trt, "ExecutionContextAllocationStrategy", None)
        if strategy is not None:
            context = self._engine.create_execution_context(strategy.USER_MANAGED)
        else:
            context = self._engine.create_execution_context_without_device_memory()
        if context is None:
            raise EngineError(f"TensorRT {self._trt.__version__} cannot run {self.name}: {self.reason}")
        return context

    def _need(self, done: bool, what: str) -> None:
        if not done:
            raise EngineError(f"{self.name} refuses {what}: {self.reason}")


def _tensorrt() -> Any:
    try:
        return importlib.import_module("tensorrt")
    except ImportError as error:
        raise EngineError(f"TensorRT cannot be imported: {error}; to do: pip install tensorrt") from error


def _logger(trt: Any, lines: list[str]) -> Any:
    """TensorRT's logger that keeps its errors; warnings go to standard error, which is Triton's log."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if int(severity) < _WARNING:
                del lines[:-7]
                lines.append(message.strip())

    return Logger()


def _allocator(trt: Any, cuda: Cuda) -> Any:
    """TensorRT's allocator that takes memory through `Cuda.allocate`; None where this TensorRT has no such class."""
    base = getattr(trt, "IGpuAllocator", None)
    if base is None:
        return None

    class Allocator(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            trt.IGpuAllocator.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> int:
            if size == 0:
                return 0
            try:
                cuda.enter()
                return cuda.allocate(size)
            except CudaError:
                return 0  # TensorRT says it better, with the size

        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            return 0  # "not supported": TensorRT allocates, copies and frees

        def free(self, memory: int) -> None:  # of releases before 8.6
            self.deallocate(memory)

        def deallocate(self, memory: int) -> bool:
            if not memory:
                return True
            try:
                cuda.enter()
                cuda.free(memory)
            except CudaError:
                return False
            return True

    return Allocator()


def describe(specs: Sequence[TensorSpec]) -> str:
    """`input_ids [128], length [1]`, for messages."""
    return ", ".join(f"{spec.name} {list(spec.row)}" for spec in specs)
