"""One face for TensorRT 8.6, 10, 11 and TensorRT-RTX; nothing else in the project imports them.

`tensorrt` and `tensorrt_rtx` have the same classes, so the types of `tensorrt-stubs` (10.13) hold for both. Where a
version lacks something, `capabilities` says so and the method leaves it out.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from builders.contract import INPUTS
from builders.errors import CompileError
from builders.tensorrt.capabilities import Capabilities, capabilities_of, version_tuple
from builders.tensorrt.gpu import Gpu, find_gpu
from builders.tensorrt.log import BuildLog, Steps, native_logger, native_monitor

if TYPE_CHECKING:
    import tensorrt as trt

Flavour = Literal["auto", "tensorrt", "rtx"]

_MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
_REMEDIES = {
    "tensorrt": "use NVIDIA's Triton container, or pip install tensorrt from NVIDIA's index (8.6.0 is on PyPI)",
    "rtx": "pip install tensorrt-rtx-cu13",
}


@dataclass(frozen=True)
class ProfileShape:
    """One optimisation profile: texts of exactly `length` tokens, 1 to `batch_max` of them."""

    length: int
    batch_max: int


@dataclass(frozen=True)
class Inspection:
    """What a deserialised plan says about itself."""

    layers: str
    """JSON of the engine inspector."""
    profile_memory: tuple[int, ...]
    """Activation memory of a context, bytes, by profile; below TensorRT 10 the same for each."""


class TensorRT:
    """An installed TensorRT.

    Args:
        module: `tensorrt` or `tensorrt_rtx`.

    Attributes:
        flavour: which of the two.
        version: its version, e.g. `10.14.1.48`.
        capabilities: what it can do.
    """

    def __init__(self, module: Any):
        """Wrap a module; `open_tensorrt` finds one."""
        self.module = module
        self.flavour: Literal["tensorrt", "rtx"] = "rtx" if module.__name__ == "tensorrt_rtx" else "tensorrt"
        self.version = str(module.__version__)
        self.capabilities: Capabilities = capabilities_of(version_tuple(self.version), rtx=self.flavour == "rtx")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a plan is tied to: TensorRT, its version, the GPU and its compute capability (None without a driver)."""
        gpu: Gpu | None = find_gpu()
        return {
            "tensorrt": self.flavour,
            "version": self.version,
            "gpu": gpu.name if gpu else None,
            "compute_capability": list(gpu.compute_capability) if gpu else None,
        }

    def builder(self, log: BuildLog) -> trt.Builder:
        """A builder that tells `log`.

        Raises:
            CompileError: TensorRT (other than RTX) was started without a GPU.
        """
        try:
            builder: trt.Builder | None = self.module.Builder(native_logger(self.module, log))
        except TypeError as error:  # pybind11's words for a null pointer
            raise CompileError(
                f"TensorRT {self.version} cannot start: {log.reason or error}",
                value=self.flavour,
                limit="an NVIDIA GPU and its driver",
                remedy="compile on the GPU machine, or use TensorRT-RTX",
            ) from error
        if builder is None:
            raise CompileError(f"TensorRT {self.version} cannot start: {log.reason}", value=self.flavour)
        return builder

    def network(self, builder: trt.Builder, onnx: Path, log: BuildLog) -> trt.INetworkDefinition:
        """Parse a graph; strongly typed where the version can.

        Raises:
            CompileError: with the parser's words for each problem.
        """
        flags = self.module.NetworkDefinitionCreationFlag
        chosen = flags.STRONGLY_TYPED if self.capabilities.strong_typing else flags.EXPLICIT_BATCH
        network: trt.INetworkDefinition = builder.create_network(1 << int(chosen))
        parser: trt.OnnxParser = self.module.OnnxParser(network, native_logger(self.module, log))
        if not parser.parse_from_file(str(onnx)):
            problems = [_problem(parser.get_error(i)) for i in range(parser.num_errors)]
            raise CompileError(
                f"TensorRT {self.version} cannot read the graph: {'; '.join(problems) or log.reason}",
                value=str(onnx),
                remedy=f"lower the graph for this version first (opset at most {self.capabilities.max_opset})",
            )
        self._allow_decomposition(network)
        return network

    def _allow_decomposition(self, network: trt.INetworkDefinition) -> None:
        """Let an attention be written out where no kernel fits; else the builder gives up (FP32, heads below 16).

        A kernel that fits is still taken (RTX 1.7); the layer listing says which it was.
        """
        if not self.capabilities.attention_op:
            return
        for place in range(network.num_layers):
            layer: Any = network.get_layer(place)  # attention is newer than the stubs
            if layer.type == getattr(self.module.LayerType, "ATTENTION_OUTPUT", None):
                # get_layer gives a plain ILayer for it (RTX 1.7, and TensorRT 11.2 as others report); there is no
                # other way in Python to make it what it is.
                layer.__class__ = self.module.IAttentionOutputLayer
                layer.attention.decomposable = True

    def config(
        self,
        builder: trt.Builder,
        profiles: Iterable[ProfileShape],
        *,
        inputs: Sequence[str] = INPUTS,
        memory_limit_bytes: int | None,
        steps: Steps | None,
    ) -> trt.IBuilderConfig:
        """Builder settings: profiles, memory limit, detailed verbosity, tactic sources, progress."""
        module = self.module
        config: trt.IBuilderConfig = builder.create_builder_config()
        config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
        if memory_limit_bytes is not None:
            config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, memory_limit_bytes)
        if self.capabilities.limited_tactics:
            wanted = (module.TacticSource.EDGE_MASK_CONVOLUTIONS, module.TacticSource.JIT_CONVOLUTIONS)
            config.set_tactic_sources(sum(1 << int(source) for source in wanted))
        if steps is not None and self.capabilities.progress_monitor:
            config.progress_monitor = native_monitor(module, steps)
        for shape in profiles:
            profile: trt.IOptimizationProfile = builder.create_optimization_profile()
            # min = opt = max for the length: a range would cost the kernels their constants.
            for name in inputs:
                width = shape.length if name == "input_ids" else 1
                least, largest = module.Dims([1, width]), module.Dims([shape.batch_max, width])
                profile.set_shape(name, least, largest, largest)
            if config.add_optimization_profile(profile) < 0:
                raise CompileError("TensorRT refused an optimisation profile", value=shape, limit="1 <= batch")
        return config

    def load_timing_cache(self, config: trt.IBuilderConfig, path: Path | None) -> bool:
        """Give the builder the timings of earlier builds.

        Returns:
            Whether timings were taken from the file; False too where they are of another version or GPU.
        """
        if path is None or not self.capabilities.timing_cache:
            return False
        content = path.read_bytes() if path.exists() else b""
        for found in ([content] if content else []) + [b""]:
            cache = config.create_timing_cache(found)
            # ignore_mismatch=False: timings of another GPU would choose the wrong kernels.
            if cache is not None and config.set_timing_cache(cache, False):
                return bool(found)
        return False

    def save_timing_cache(self, config: trt.IBuilderConfig, path: Path | None) -> None:
        """Write the timings back, together with what another build wrote meanwhile."""
        if path is None or not self.capabilities.timing_cache:
            return
        cache = config.get_timing_cache()
        if cache is None:
            return
        if path.exists():
            other = config.create_timing_cache(path.read_bytes())
            if other is not None:
                cache.combine(other, False)  # refuses another GPU's by itself
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        draft.write_bytes(bytes(cache.serialize()))
        draft.replace(path)

    def inspect(self, plan: Any, log: BuildLog) -> Inspection | None:
        """Deserialise a plan and read its layers, or None where no driver lets it.

        Args:
            plan: what the builder returned, or a file's bytes.
            log: told what TensorRT says; its errors do not fail a build whose plan is written.
        """
        if find_gpu() is None:
            return None
        runtime: trt.Runtime = self.module.Runtime(native_logger(self.module, log))
        engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            return None
        inspector: trt.EngineInspector = engine.create_engine_inspector()
        layers = inspector.get_engine_information(self.module.LayerInformationFormat.JSON)
        count = engine.num_optimization_profiles
        if self.capabilities.profile_memory_per_context:
            # The plain name is deprecated where `_v2` exists.
            name = "get_device_memory_size_for_profile"
            size = getattr(engine, f"{name}_v2", None) or getattr(engine, name)
            memory = tuple(int(size(i)) for i in range(count))
        else:
            memory = (int(engine.device_memory_size),) * count
        return Inspection(layers, memory)


def open_tensorrt(flavour: Flavour = "auto") -> TensorRT:
    """Load TensorRT.

    Args:
        flavour: `tensorrt`, `rtx`, or `auto`: TensorRT where it and a GPU are there, else TensorRT-RTX.

    Raises:
        CompileError: not installed; the message names the package.
    """
    if flavour not in get_args(Flavour):
        raise CompileError("no such TensorRT", value=flavour, limit="auto, tensorrt or rtx", remedy="choose one")
    wanted = ("tensorrt", "rtx") if flavour == "auto" else (flavour,)
    found = {name: module for name in wanted if (module := _load(_MODULES[name])) is not None}
    if flavour == "auto" and "rtx" in found and find_gpu() is None:
        return TensorRT(found["rtx"])  # the one that builds without a GPU
    for module in found.values():
        return TensorRT(module)
    raise CompileError(
        "TensorRT is not installed",
        value=flavour,
        limit=" or ".join(_MODULES[name] for name in wanted),
        remedy="; or ".join(_REMEDIES[name] for name in wanted),
    )


def _problem(error: Any) -> str:
    """A parser's error with the node it is about, which only newer versions tell."""
    node = [str(getattr(error, name)()) for name in ("node_operator", "node_name") if hasattr(error, name)]
    return " ".join([str(error.desc()), *(["in", *node] if any(node) else [])])


def _load(name: str) -> Any | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ImportError:  # absent, or its libraries are
        return None
    # tensorrt-stubs leaves a folder of this name without code, which imports as an empty namespace.
    return module if hasattr(module, "Builder") else None
