"""What a text costs: multiplications by bucket, and time and memory as far as measured figures reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Bytes of a number, by precision.
BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2})


@dataclass(frozen=True)
class Size:
    """An encoder as far as its arithmetic is concerned."""

    layers: int
    hidden: int
    """Width of a token vector."""
    heads: int
    inner: int
    """Width between the two products of a feed-forward block."""
    products: int
    """Weights that every token is multiplied with, biases and look-up tables left out."""

    def flops(self, tokens: int) -> float:
        """Floating point operations of one text padded to `tokens`: two for each weight and token, and the scores.

        Every layer counts as one that sees all tokens; a local window costs less.
        """
        return 2.0 * tokens * self.products + 4.0 * tokens**2 * self.hidden * self.layers

    def activation_bytes(self, batch: int, tokens: int, precision: str) -> int:
        """Estimate of the most memory that one run holds besides the weights, bytes.

        Scores and their softmax of one layer, the token vectors five times over (input, residual, Q, K, V) and the
        wide middle of the feed-forward block, as if nothing were fused. A fused attention holds no scores.
        """
        scores = 2 * self.heads * tokens**2
        vectors = tokens * (5 * self.hidden + self.inner)
        return batch * (scores + vectors) * BYTES[precision]


@dataclass(frozen=True)
class Measured:
    """A model whose times were measured."""

    what: str
    """Model, engine and machine, for people."""
    size: Size
    milliseconds: Mapping[int, float]
    """Tokens -> time of one text alone, ms."""

    def estimate(self, size: Size, tokens: int) -> float:
        """Time of one text, ms: its operations at the rate measured at this length, between the lengths measured."""
        lengths = sorted(self.milliseconds)
        rates = [self.size.flops(length) / self.milliseconds[length] for length in lengths]
        if tokens <= lengths[0] or tokens >= lengths[-1]:
            return size.flops(tokens) / (rates[0] if tokens <= lengths[0] else rates[-1])
        place = next(number for number, length in enumerate(lengths) if length >= tokens)
        share = (tokens - lengths[place - 1]) / (lengths[place] - lengths[place - 1])
        return size.flops(tokens) / (rates[place - 1] + share * (rates[place] - rates[place - 1]))


MEASURED: Mapping[str, Measured] = MappingProxyType(
    {
        "onnxruntime": Measured(
            "MiniLM-L6 with ONNX Runtime in FP32 on one thread of an AMD EPYC",
            Size(layers=6, hidden=384, heads=12, inner=1536, products=10_616_832),
            MappingProxyType({32: 6.2, 128: 19.0, 512: 112.0}),
        ),
        "tensorrt": Measured(
            "BERT-base with TensorRT 8.6 in FP16 on an H200",
            Size(layers=12, hidden=768, heads=12, inner=3072, products=84_934_656),
            MappingProxyType({128: 0.872, 512: 1.480}),
        ),
    }
)
"""By `engine.kind`; docs/measurements/ says how the GPU's were taken."""
