"""What each TensorRT can do, decided from its version in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Abilities that the build depends on."""

    strong_typing: bool
    """Types come from the graph (10 and newer, and RTX); else layer precisions have to be set."""
    bf16: bool
    """BF16 tensors."""
    attention_op: bool
    """ONNX `Attention` (opset 23) becomes one attention layer (10.14 and newer, and RTX)."""
    gelu_op: bool
    """ONNX `Gelu` (opset 20) is known to the parser (10 and newer, and RTX)."""
    shape_range: bool
    """`start` and `end` of ONNX `Shape` (opset 15) are read; 8.6 ignores them and takes the whole shape."""
    max_opset: int
    """Newest set of standard operators the parser takes."""
    profile_memory_per_context: bool
    """A context takes the memory of its own profile, not of the largest (10 and newer)."""
    timing_cache: bool
    """Kernel timings can be kept between builds; RTX times nothing at build time and ignores a cache."""
    progress_monitor: bool
    """The builder reports its steps (10 and newer, and RTX)."""
    limited_tactics: bool
    """cuBLAS and cuDNN tactics are left out: what 8.6 wants of them is not in today's containers."""


def capabilities_of(version: tuple[int, ...], *, rtx: bool) -> Capabilities:
    """The abilities of a version.

    Sources: onnx-tensorrt's Changelog (8.6: LayerNormalization and node metadata; 9.0: BF16), this project's facts on
    8.6 and 10.14, 8.6 and TensorRT-RTX 1.7 themselves (`Shape`; the timing cache calls of RTX warn that they do
    nothing). Not checked yet on an installed 10.0 to 10.13: that their parser knows Gelu and reads opset 20; `Shape` is
    written out for them as for 8.6, which costs nothing.

    Args:
        version: of `tensorrt` or of `tensorrt_rtx`, e.g. (10, 14, 1).
        rtx: TensorRT-RTX, whose versions count from 1.
    """
    modern = rtx or version >= (10,)
    attention = rtx or version >= (10, 14)
    return Capabilities(
        strong_typing=modern,
        bf16=modern,
        attention_op=attention,
        gelu_op=modern,
        shape_range=attention,
        max_opset=23 if attention else 20 if modern else 17,
        profile_memory_per_context=modern,
        timing_cache=not rtx,
        progress_monitor=modern,
        limited_tactics=not modern,
    )


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `10.14.1.48` to (10, 14, 1, 48)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
