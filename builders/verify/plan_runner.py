"""A compiled plan as a runner of the gate: what the lanes will serve is run before it is published.

It runs under Python 3.10 too, the only one that TensorRT 8.6 has bindings for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from builders.contract import INPUTS, SEGMENT
from builders.errors import CompileError
from builders.tensorrt.adapter import TensorRT, open_tensorrt
from builders.tensorrt.log import BuildLog, native_logger
from builders.verify.cuda import Cuda
from builders.verify.runner import OUTPUTS, Floats, Ids, VerifyError

if TYPE_CHECKING:
    import tensorrt as trt

_TYPES: Mapping[str, Any] = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16}


class _Loaded:
    """One plan file, deserialised, with one execution context."""

    def __init__(self, native: TensorRT, runtime: trt.Runtime, path: Path, log: BuildLog):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise VerifyError(f"the plan cannot be read: {error.strerror}", value=str(path)) from error
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise VerifyError(
                f"TensorRT {native.version} does not take the plan: {log.reason}",
                value=str(path),
                remedy="compile it on this machine, with this TensorRT",
            )
        context: trt.IExecutionContext | None = engine.create_execution_context()
        if context is None:
            raise VerifyError(
                f"TensorRT {native.version} cannot run the plan: {log.reason}",
                value=str(path),
                remedy="free memory on the GPU, or lower engine.max_batch_tokens",
            )
        self.engine, self.context, self.profile = engine, context, 0
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        output = next((name for name in OUTPUTS if name in names), None)
        if output is None or not {*INPUTS} <= set(names):
            limit = f"{', '.join(INPUTS)} and {' or '.join(OUTPUTS)}"
            raise VerifyError("the plan has not the lanes' contract", value=names, limit=limit)
        self.segment = SEGMENT in names
        outputs = [name for name in names if name not in (*INPUTS, SEGMENT)]
        kinds = {name: str(engine.get_tensor_dtype(name)).rpartition(".")[2] for name in outputs}
        if unknown := {name: kind for name, kind in kinds.items() if kind not in _TYPES}:
            raise VerifyError("outputs of a type that is not compared", value=unknown, limit=", ".join(_TYPES))
        # Blocks first, as the other runners have them.
        self.outputs = {name: kinds[name] for name in sorted(outputs, key=output.__eq__)}


class PlanRunner:
    """Plans on the GPU, behind `builders.verify.runner.Runner`.

    A batch goes to the shortest bucket that holds its L, padded up to it; more rows than the bucket's profile takes
    are run in parts. Outputs are filled with NaN before each run. Every plan stays loaded, with the memory of one
    context each, until `close`. For one thread at a time.

    Args:
        plans: bucket length -> plan file and number of the bucket's profile in it; a file may serve several buckets.
        tensorrt: what the plans were compiled with; left out, the installed `tensorrt`.
        number: of the GPU.

    Raises:
        VerifyError: TensorRT, cuda-python or the GPU is missing, or a plan is not for them.
    """

    def __init__(self, plans: Mapping[int, tuple[Path, int]], *, tensorrt: TensorRT | None = None, number: int = 0):
        """See the class."""
        if not plans:
            raise VerifyError("no plans to run", remedy="give one for each bucket")
        native = tensorrt or _tensorrt()
        self._plans, self._log = dict(sorted(plans.items())), BuildLog()
        self._loaded: dict[Path, _Loaded] = {}
        self._last: trt.IExecutionContext | None = None
        self._cuda: Cuda | None = Cuda(number)
        try:
            self._runtime: trt.Runtime | None = native.module.Runtime(native_logger(native.module, self._log))
            for length, (path, profile) in self._plans.items():
                if path not in self._loaded:
                    self._loaded[path] = _Loaded(native, self._runtime, path, self._log)
                self._most(length, profile)
        except BaseException:
            with suppress(VerifyError):  # of a GPU in a bad state; the first error is the one to tell
                self.close()
            raise

    def _most(self, length: int, profile: int) -> int:
        """Rows that a bucket's profile takes.

        Raises:
            VerifyError: it is no profile for this length.
        """
        path, _ = self._plans[length]
        engine = self._loaded[path].engine
        if not 0 <= profile < engine.num_optimization_profiles:
            raise VerifyError(
                f"{path.name} has no such profile", value=profile, limit=f"0 to {engine.num_optimization_profiles - 1}"
            )
        least, _, largest = (_sizes(shape) for shape in engine.get_tensor_profile_shape("input_ids", profile))
        if not least[1] <= length <= largest[1]:
            raise VerifyError(
                f"profile {profile} of {path.name} is not for this bucket",
                value=length,
                limit=f"{least[1]} to {largest[1]} tokens",
            )
        return int(largest[0])

    def run(self, input_ids: Ids, length: Ids, segment_start: Ids | None = None) -> Mapping[str, Floats]:
        """See `Runner.run`."""
        self.cuda.enter()
        segment = length if segment_start is None else segment_start
        rows, width = input_ids.shape
        if length.shape != (rows, 1) or rows < 1 or not ((length >= 0) & (length <= width)).all():
            raise VerifyError("lengths do not fit the batch", value=length.tolist(), limit=f"[{rows}, 1], 0 to {width}")
        bucket = next((each for each in self._plans if each >= width), None)
        if bucket is None:
            raise VerifyError("no plan takes such a batch", value=f"L {width}", limit=f"{max(self._plans)} tokens")
        path, profile = self._plans[bucket]
        most = self._most(bucket, profile)
        parts = []
        for first in range(0, rows, most):
            ids = padded(input_ids[first : first + most], bucket)
            chosen = slice(first, first + most)
            parts.append(self._run(self._loaded[path], profile, ids, length[chosen], segment[chosen]))
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return {name: np.ascontiguousarray(a[:, :width]) if a.ndim == 3 else a for name, a in found.items()}

    def _run(self, plan: _Loaded, profile: int, ids: Ids, length: Ids, segment: Ids) -> dict[str, Floats]:
        cuda, context = self.cuda, plan.context
        if profile != plan.profile:
            self._need(context.set_optimization_profile_async(profile, int(cuda.stream)), f"profile {profile}")
            plan.profile = profile
        arrays = {"input_ids": ids, "length": np.ascontiguousarray(length, np.int32)}
        if plan.segment:
            arrays[SEGMENT] = np.ascontiguousarray(segment, np.int32)
        for name, array in arrays.items():
            address = cuda.buffer(name, array.nbytes)
            cuda.upload(address, array)
            self._need(context.set_input_shape(name, array.shape), f"shape {array.shape} of {name}")
            self._need(context.set_tensor_address(name, address), f"address of {name}")
        raw: dict[str, tuple[int, NDArray[Any]]] = {}
        for name, kind in plan.outputs.items():
            array = np.empty(_sizes(context.get_tensor_shape(name)), _TYPES[kind])
            address = cuda.buffer(name, array.nbytes)
            cuda.spoil(address, array.nbytes)
            self._need(context.set_tensor_address(name, address), f"address of {name}")
            raw[name] = address, array
        self._need(context.execute_async_v3(int(cuda.stream)), f"batch {ids.shape[0]}, L {ids.shape[1]}")
        self._last = context
        for address, array in raw.values():
            cuda.download(address, array)
        cuda.wait()
        return {name: _floats(array) for name, (_, array) in raw.items()}

    def _need(self, done: bool, what: str) -> None:
        if not done:
            raise VerifyError(f"the plan refuses {what}: {self._log.reason}", remedy="see TensorRT's words")

    def repeat(self) -> None:
        """Queue the last batch (its last part) once more, without copies and without waiting; for timing."""
        if self._last is None:
            raise VerifyError("nothing was run", remedy="run a batch first")
        self._need(self._last.execute_async_v3(int(self.cuda.stream)), "the last batch again")

    @property
    def cuda(self) -> Cuda:
        """The driver with the stream that everything runs on."""
        if self._cuda is None:
            raise VerifyError("the runner is closed", remedy="run before close()")
        return self._cuda

    def close(self) -> None:
        """Give the plans and their memory back; a second call does nothing."""
        cuda, self._cuda = self._cuda, None
        if cuda is None:
            return
        cuda.enter()
        self._last = None
        self._loaded.clear()  # a context before its engine, engines before their runtime
        self._runtime = None
        cuda.close()

    def __enter__(self) -> PlanRunner:
        """For `with`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close; what fails then does not hide an error that came first."""
        with suppress(VerifyError) if error else nullcontext():
            self.close()


def padded(input_ids: Ids, width: int) -> Ids:
    """The rows padded with token 0 to a bucket: INT32 [b, width], contiguous."""
    out = np.zeros((len(input_ids), width), np.int32)
    out[:, : input_ids.shape[1]] = input_ids
    return out


def _sizes(dims: Any) -> tuple[int, ...]:
    """TensorRT's Dims, which the stubs do not know to be iterable."""
    return tuple(int(size) for size in dims)


def _floats(array: NDArray[Any]) -> Floats:
    if array.dtype == np.uint16:  # BF16: the upper half of an FP32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _tensorrt() -> TensorRT:
    try:
        return open_tensorrt("tensorrt")
    except CompileError as error:
        raise VerifyError(error.what, value=error.value, limit=error.limit, remedy=error.remedy) from None
