from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest

import builders.tensorrt.adapter as adapter
from builders.contract import Contract
from builders.errors import CompileError
from builders.tensorrt.adapter import ProfileShape, TensorRT, open_tensorrt
from builders.tensorrt.log import BuildLog
from builders.tensorrt.weak_typing import hold_types


def fake_module(name: str, version: str, *, builder: bool = True) -> Any:
    module = types.ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    if builder:
        module.Builder = object  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `import` finds."""
    modules: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(adapter, "find_gpu", lambda: None)
    return modules


def test_packages_are_named_when_none_is_installed(installed: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match=r"not installed.*Triton container.*pip install tensorrt-rtx-cu13"):
        open_tensorrt()
    with pytest.raises(CompileError, match=r"not installed: 'rtx'.*tensorrt_rtx.*tensorrt-rtx-cu13$"):
        open_tensorrt("rtx")


def test_stubs_are_no_tensorrt_when_they_are_all_there_is(installed: dict[str, Any]) -> None:
    installed["tensorrt"] = fake_module("tensorrt", "10.13", builder=False)
    with pytest.raises(CompileError, match="not installed"):
        open_tensorrt("tensorrt")


def test_rtx_is_taken_when_there_is_no_gpu(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["tensorrt"] = fake_module("tensorrt", "10.14.1.48")
    installed["tensorrt_rtx"] = fake_module("tensorrt_rtx", "1.7.1.116")
    assert open_tensorrt().flavour == "rtx"
    monkeypatch.setattr(adapter, "find_gpu", lambda: object())
    found = open_tensorrt()
    assert (found.flavour, found.version, found.capabilities.attention_op) == ("tensorrt", "10.14.1.48", True)


def test_refused_when_flavour_is_unknown() -> None:
    with pytest.raises(CompileError, match="no such TensorRT: 'trt'"):
        open_tensorrt("trt")  # type: ignore[arg-type]


def test_timing_cache_is_left_alone_when_rtx(rtx: TensorRT, tmp_path: Path) -> None:
    builder = rtx.builder(BuildLog())
    config = rtx.config(builder, [], memory_limit_bytes=1 << 28, steps=None)
    assert config.get_memory_pool_limit(rtx.module.MemoryPoolType.WORKSPACE) == 1 << 28
    assert rtx.load_timing_cache(config, tmp_path / "cache") is False
    rtx.save_timing_cache(config, tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("segment", [False, True])
def test_profile_fixes_every_input_of_the_graph(segment: bool) -> None:
    space = types.SimpleNamespace
    shapes: list[dict[str, list[list[int]]]] = []

    class Profile(dict[str, list[list[int]]]):
        def set_shape(self, name: str, *sizes: list[int]) -> None:
            self[name] = list(sizes)

    module = fake_module("tensorrt", "10.14.1")
    module.ProfilingVerbosity, module.Dims = space(DETAILED="DETAILED"), list
    config = space(add_optimization_profile=lambda profile: shapes.append(dict(profile)) or len(shapes) - 1)
    builder = space(create_builder_config=lambda: config, create_optimization_profile=Profile)
    inputs = Contract(segment=segment).inputs
    TensorRT(module).config(
        builder,  # type: ignore[arg-type]
        [ProfileShape(128, 32), ProfileShape(512, 8)],
        inputs=inputs,
        memory_limit_bytes=None,
        steps=None,
    )
    assert [list(profile) for profile in shapes] == [list(inputs)] * 2
    for profile, length, batch in zip(shapes, (128, 512), (32, 8), strict=True):
        for name, (least, usual, largest) in profile.items():
            width = length if name == "input_ids" else 1
            assert (least, usual, largest) == ([1, width], [batch, width], [batch, width])


class FakeConfig:
    """A config with a timing cache, as TensorRT 8.6 to 11 have it; bytes that begin with `other` are another GPU's."""

    def __init__(self) -> None:
        self.cache: FakeCache | None = None

    def create_timing_cache(self, content: bytes) -> FakeCache:
        return FakeCache(content)

    def set_timing_cache(self, cache: FakeCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = None if cache.content.startswith(b"other") else cache
        return self.cache is not None

    def get_timing_cache(self) -> FakeCache | None:
        return self.cache


class FakeCache:
    def __init__(self, content: bytes):
        self.content = content

    def combine(self, other: FakeCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.content += other.content
        return True

    def serialize(self) -> bytes:
        return self.content


def test_timings_are_kept_and_combined_when_tensorrt(tmp_path: Path) -> None:
    native, config, path = TensorRT(fake_module("tensorrt", "8.6.0")), FakeConfig(), tmp_path / "cache"
    assert native.load_timing_cache(config, path) is False  # type: ignore[arg-type]
    assert config.cache is not None
    config.cache.content = b"mine"
    path.write_bytes(b"meanwhile")
    native.save_timing_cache(config, path)  # type: ignore[arg-type]
    assert path.read_bytes() == b"minemeanwhile"
    assert native.load_timing_cache(config, path) is True  # type: ignore[arg-type]
    path.write_bytes(b"other GPU")
    assert native.load_timing_cache(config, path) is False  # type: ignore[arg-type]
    assert config.cache is not None  # it starts with an empty one
    assert config.cache.content == b""


class FakeLayer:
    def __init__(
        self, name: str, kind: str = "PLAIN", dtype: str = "HALF", *, shape: bool = False, result: str | None = None
    ):
        self.name, self.type, self.num_outputs = name, kind, 1
        self.output = types.SimpleNamespace(dtype=dtype, is_shape_tensor=shape, name=result or f"{name}_output")
        self.precision: str | None = None
        self.set: dict[int, str] = {}

    def get_output(self, number: int) -> Any:
        return self.output

    def set_output_type(self, number: int, dtype: str) -> None:
        self.set[number] = dtype


def test_layer_precisions_are_set_when_typing_is_weak() -> None:
    space = types.SimpleNamespace
    module = space(
        DataType=space(FLOAT="FLOAT", HALF="HALF"),
        BuilderFlag=space(FP16="FP16", OBEY_PRECISION_CONSTRAINTS="OBEY"),
        LayerType=space(CONSTANT="CONSTANT", SHAPE="SHAPE", CAST="CAST"),
    )
    layers = [
        FakeLayer("product"), FakeLayer("softmax", dtype="FLOAT"), FakeLayer("product_weights", "CONSTANT"),
        FakeLayer("ids", dtype="INT32"), FakeLayer("sizes", shape=True),
        # As the parser of 8.6 names them: a bias of a norm in more dimensions and the norm; squares and their root.
        FakeLayer("(Unnamed Layer* 65) [Shuffle]"), FakeLayer("(Unnamed Layer* 66) [Normalization]", result="norm"),
        FakeLayer("(Unnamed Layer* 90) [ElementWise]", dtype="FLOAT"), FakeLayer("length_114", result="length"),
    ]  # fmt: skip
    network = space(num_layers=len(layers), get_layer=lambda place: layers[place])
    flags: list[str] = []
    graph = {"product": "FLOAT16", "softmax": "FLOAT", "ids": "FLOAT16", "sizes": "FLOAT", "product_weights": "FLOAT16"}
    graph |= {"norm": "FLOAT16", "length": "FLOAT"}
    held = hold_types(module, network, space(set_flag=flags.append), graph)  # type: ignore[arg-type]
    assert held == 6
    assert [layer.precision for layer in layers[:5]] == ["HALF", "FLOAT", None, None, None]
    assert [layer.precision for layer in layers[5:]] == ["HALF", "HALF", "FLOAT", "FLOAT"]
    assert layers[1].set == {0: "FLOAT"}
    assert flags == ["FP16", "OBEY"]
