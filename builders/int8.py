"""Static int8 for the CPU engine: the products of the blocks on 8-bit numbers, everything else in FP32.

Written as standard QuantizeLinear and DequantizeLinear around each product. ONNX Runtime makes one integer kernel of
the group; any other engine that knows the standard computes the same numbers more slowly. The scales are constants of
the graph. Scales that follow the batch (dynamic int8) would be more accurate for a text alone, but then a text's answer
depends on the texts that happen to share its batch, which a server with dynamic batches cannot have.

One scale serves all channels of a product's input, and a few channels of a transformer are tens of times as large as
the rest. So each channel is divided by `max|x|^alpha / max|w|^(1 - alpha)` before it is rounded, and the weight's row
is multiplied by the same, which leaves the product as it is (SmoothQuant, Xiao et al. 2022, arXiv:2211.10438).
The rest is chosen product by product on calibration texts, never on the gate's: alpha, and how much of the range is
kept (values beyond are clipped, which pays where a few are far out). A product whose error is above
`MOST_ERROR` for every choice stays in FP32.

Attention's own two products (scores, weighted sum) have no constant side and stay FP32, as do norms, softmax,
activations, embeddings and everything behind the last norm: the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from builders.errors import PrecisionError
from builders.fuse.graph import add_constant, add_node, constant, rank, walk_back
from builders.verify.runner import Ids, OnnxRunner, ask

if TYPE_CHECKING:
    import onnx_ir

Floats = NDArray[np.float32]

#: Exponents that are tried; 0 leaves the channels as they are, 1 makes them all equally large.
ALPHAS = (0.0, 0.5, 0.65, 0.8, 0.9)
#: Shares of the calibrated range that are tried.
RANGES = (1.0, 0.85, 0.7, 0.55)
#: A product with a larger error stays FP32. The error of a vector is its length as a share of the exact result's;
#: that of a product, the root mean square over the sample's vectors.
MOST_ERROR = 0.05
#: Token vectors that the choice is made on, of each text: the first, the last and some between.
ROWS = 6
#: Such vectors of one product at most.
SAMPLE = 768

_NORMS = ("LayerNormalization", "RMSNormalization")


@dataclass(frozen=True)
class Int8Product:
    """One product with a constant side, and what was chosen for it."""

    name: str
    """The node."""
    shape: tuple[int, int]
    """Of the weight, [in, out]."""
    alpha: float
    """Exponent of the smoothing."""
    kept: float
    """Share of the calibrated range; values beyond are clipped."""
    error: float
    """On the calibration's sample; see `MOST_ERROR`."""
    int8: bool
    """False: it stays FP32."""


@dataclass(frozen=True)
class Row:
    """A calibration text as the lanes get it."""

    ids: Ids
    """INT32 [length], special tokens included."""
    segment_start: int
    """First token of the second text; the length where there is none."""


@dataclass(frozen=True)
class Seen:
    """What came into one product."""

    low: Floats
    """[in], least value of each channel."""
    high: Floats
    """[in], largest value."""
    sample: Floats
    """[n, in], some of the vectors."""


def find_products(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Products of token vectors with a constant matrix, in front of the last norm, in the graph's order.

    Raises:
        PrecisionError: there is none, as in a graph whose norms are no single operators.
    """
    norms = [node for node in model.graph if node.op_type in _NORMS and rank(node.outputs[0]) == 3]
    last = set(walk_back([norms[-1].outputs[0]])) if norms else set()
    found = [node for node in model.graph if node in last and node.op_type == "MatMul" and _of_tokens(node)]
    if not found:
        raise PrecisionError(
            "int8 finds no product of a transformer block",
            value=f"{len(norms)} norms of token vectors",
            limit="MatMul of [b, L, in] with a constant [in, out] in front of a LayerNormalization",
            remedy="run the step `layer_norm`, or use fp32",
        )
    return found


def _of_tokens(node: onnx_ir.Node) -> bool:
    weight = constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or rank(node.inputs[0]) != 3:
        return False
    # DeBERTa's table of distances goes through such products too, and is the same for every text.
    makers = walk_back([node.inputs[0]])
    return any(value is not None and value.is_graph_input() for maker in makers for value in maker.inputs)


def quantize_static(model: onnx_ir.Model, rows: Sequence[Row]) -> tuple[Int8Product, ...]:
    """Write a fused FP32 graph's products in int8, in place. Equal graphs and rows give equal graphs.

    Args:
        model: the fused graph, every tensor with its type and rank.
        rows: calibration texts.

    Returns:
        Every product and what was chosen for it.

    Raises:
        PrecisionError: no products, no rows, or numbers that are not finite.
    """
    products = find_products(model)
    seen = observe(model, products, rows)
    chosen = []
    for number, node in enumerate(products):
        weight = constant(node.inputs[1])
        assert weight is not None and node.inputs[0] is not None  # noqa: S101, PT018 - find_products took no other
        name = node.name or f"product.{number}"
        best = _choose(name, weight, seen[str(node.inputs[0].name)])
        chosen.append(best)
        if best.int8:
            _rewrite(model.graph, node, name, weight, seen[str(node.inputs[0].name)], best)
    return tuple(chosen)


def observe(model: onnx_ir.Model, products: Sequence[onnx_ir.Node], rows: Sequence[Row]) -> Mapping[str, Seen]:
    """Run the texts one by one, so that no padding is seen, and note what comes into each product, by value name.

    Raises:
        PrecisionError: no rows, or a value that is not finite.
    """
    if not rows:
        raise PrecisionError("int8 without calibration texts", value=0, limit="1 or more", remedy="give some")
    names = list(dict.fromkeys(str(node.inputs[0].name) for node in products if node.inputs[0] is not None))
    runner = OnnxRunner(model, {name: name for name in names}, threads=1)
    chance = np.random.default_rng(0)
    low: dict[str, Floats] = {}
    high: dict[str, Floats] = {}
    kept: dict[str, list[Floats]] = {name: [] for name in names}
    for row in rows:
        length = np.array([[len(row.ids)]], dtype=np.int32)
        answer = ask(runner, row.ids[None].astype(np.int32), length, np.array([[row.segment_start]], dtype=np.int32))
        # The first and the last are special tokens, whose vectors are like no others.
        places = np.unique(np.append(chance.integers(0, len(row.ids), ROWS), (0, len(row.ids) - 1)))
        for name in names:
            vectors = answer[name].reshape(-1, answer[name].shape[-1])
            if not np.isfinite(vectors).all():
                raise PrecisionError("a calibration text gives numbers that are not finite", value=name)
            least, most = vectors.min(0), vectors.max(0)
            low[name] = np.minimum(low.get(name, least), least)
            high[name] = np.maximum(high.get(name, most), most)
            kept[name].append(vectors[places])
    return {name: Seen(low[name], high[name], _thinned(np.concatenate(kept[name]))) for name in names}


def _thinned(vectors: Floats) -> Floats:
    step = max(1, -(-len(vectors) // SAMPLE))
    return vectors[::step]


def _choose(name: str, weight: Floats, seen: Seen) -> Int8Product:
    exact = seen.sample @ weight
    # Vector by vector: the few that are tens of times as long as the rest would decide alone.
    sizes = np.maximum((exact.astype(np.float64) ** 2).mean(1), 1e-30)
    tried = []
    for alpha in ALPHAS:
        smooth = _smoothing(weight, seen, alpha)
        rounded, column = _round_weight(weight, smooth)
        for kept in RANGES:
            scale, zero = _range(seen, smooth, kept)
            levels = np.clip(np.rint(seen.sample / smooth / scale) + zero, 0, 255) - zero
            got = (levels.astype(np.float32) @ rounded.astype(np.float32)) * (scale * column)
            error = float(np.sqrt((((got - exact).astype(np.float64) ** 2).mean(1) / sizes).mean()))
            tried.append((error, alpha, kept))
    error, alpha, kept = min(tried)
    shape = (weight.shape[0], weight.shape[1])
    return Int8Product(name, shape, alpha, kept, error, error <= MOST_ERROR)


def _smoothing(weight: Floats, seen: Seen, alpha: float) -> Floats:
    """[in], what each channel is divided by; of geometric mean 1."""
    if alpha == 0:
        return np.ones(len(weight), dtype=np.float32)
    largest = np.maximum(np.maximum(np.abs(seen.low), np.abs(seen.high)), 1e-5).astype(np.float64)
    heaviest = np.maximum(np.abs(weight).max(1), 1e-5).astype(np.float64)
    logs = alpha * np.log(largest) - (1 - alpha) * np.log(heaviest)
    smooth: Floats = np.exp(logs - logs.mean()).astype(np.float32)
    return smooth


def _round_weight(weight: Floats, smooth: Floats) -> tuple[NDArray[np.int8], Floats]:
    """INT8 [in, out] and the scale of each column [out]."""
    wide = weight * smooth[:, None]
    scale = np.maximum(np.abs(wide).max(0) / np.float32(127), np.float32(1e-12)).astype(np.float32)
    return np.clip(np.rint(wide / scale), -127, 127).astype(np.int8), scale


def _range(seen: Seen, smooth: Floats, kept: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point of the input; 0 is always a level of its own."""
    low = min(float((seen.low / smooth).min()) * kept, 0.0)
    high = max(float((seen.high / smooth).max()) * kept, 0.0)
    scale = np.float32(max((high - low) / 255, 1e-12))
    return scale, np.uint8(np.clip(np.rint(-low / float(scale)), 0, 255))


def _rewrite(
    graph: onnx_ir.Graph, node: onnx_ir.Node, name: str, weight: Floats, seen: Seen, chosen: Int8Product
) -> None:
    import onnx_ir as ir

    smooth = _smoothing(weight, seen, chosen.alpha)
    rounded, column = _round_weight(weight, smooth)
    scale, zero = _range(seen, smooth, chosen.kept)
    entry = node.inputs[0]
    assert entry is not None  # noqa: S101 - a product has two inputs
    value = entry
    if chosen.alpha:
        divisor = add_constant(graph, f"{name}.smooth", (1 / smooth).astype(np.float32))
        (value,) = add_node(node, "Mul", [entry, divisor], name=f"{name}.smoothed", like=entry)
    levels = [
        add_constant(graph, f"{name}.scale", np.array(scale)),
        add_constant(graph, f"{name}.zero", np.array(zero)),
    ]
    (narrow,) = add_node(node, "QuantizeLinear", [value, *levels], name=f"{name}.narrow")
    narrow.type, narrow.shape = ir.TensorType(ir.DataType.UINT8), entry.shape
    (wide,) = add_node(node, "DequantizeLinear", [narrow, *levels], name=f"{name}.wide", like=entry)
    stored = [
        add_constant(graph, f"{name}.weight", rounded),
        add_constant(graph, f"{name}.columns", column),
        add_constant(graph, f"{name}.zeros", np.zeros(len(column), dtype=np.int8)),
    ]
    (matrix,) = add_node(
        node, "DequantizeLinear", stored, name=f"{name}.matrix", like=node.inputs[1], attributes={"axis": 1}
    )
    node.replace_input_with(0, wide)
    node.replace_input_with(1, matrix)
