"""What a fusion step is, and what it may know of the build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import onnx_ir as ir

LIST = "see `python -m builders build --list`"


@dataclass(frozen=True)
class Target:
    """What the graph is made for, as far as the fusions are concerned."""

    name: str
    """Key of `TARGETS`."""
    attention: bool
    """It runs ONNX `Attention` (opset 23)."""
    off: frozenset[str]
    """Steps that run only when they are named."""
    one_bias: bool
    """Several biases of the scores are added up once for all layers, instead of one by one in each layer."""


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            # It takes `Attention` from 1.23 on and gains nothing by it: see builders/fuse/attention.py.
            Target("onnxruntime", attention=True, off=frozenset({"attention"}), one_bias=True),
            # Opset 17 at most. A bias per row and head of [b, heads, L, L] would be 200 MB to read in each layer
            # (32 x 12 x 512 x 512, FP16); TensorRT fuses two broadcast adds into one kernel that reads 6 MB.
            # 8.6 merges Q, K and V by itself, and copies twice at our Split: 11 % slower at 32 texts on an H200
            # (docs/measurements/).
            Target("tensorrt-8.6", attention=False, off=frozenset({"attention", "qkv"}), one_bias=False),
            Target("tensorrt-10", attention=False, off=frozenset({"attention"}), one_bias=False),
            Target("tensorrt-10.14", attention=True, off=frozenset(), one_bias=True),
            Target("tensorrt-rtx", attention=True, off=frozenset(), one_bias=True),
        )
    }
)
"""`tensorrt-10` is 10.0 to 10.13; `tensorrt-10.14` is everything from there on, 11 included."""


@dataclass(frozen=True)
class Context:
    """What a step may need beside the graph."""

    target: Target
    """What the graph is made for."""
    max_length: int
    """Longest text that computed positions must reach, tokens."""


class Step(Protocol):
    """One named rewriting of the graph, in place."""

    @property
    def name(self) -> str:
        """Short name, as `--only` and `--skip` take it."""
        ...

    @property
    def about(self) -> str:
        """One line for `--list`."""
        ...

    @property
    def sites(self) -> tuple[str, ...]:
        """Kinds of sites (fields of `table.Sites`) that this step answers for in the final graph."""
        ...

    def apply(self, model: ir.Model, context: Context) -> int:
        """Rewrite what is found and return the number of rewritings; 0 leaves the graph as it was."""
        ...
