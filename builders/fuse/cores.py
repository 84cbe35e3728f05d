"""Where attention is in a graph: each core with its projections, however the exporter spelt it.

One matcher serves all steps and the count: what it does not recognise is not fused, and the table then says so.
Spellings known: eager attention of transformers (scale as Mul or Div on the scores, any number of added biases),
scaled_dot_product_attention as torch.onnx writes it below opset 23 (scale on Q and on K, K transposed through three
axes) and from 23 on (an `Attention` operator between transposes), and this package's own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from builders.fuse.graph import attribute, constant, operands, producer, rank, scalar, size, walk_back

HEADS_OUT = (0, 2, 1, 3)
KEYS_OUT = (0, 2, 3, 1)


@dataclass(frozen=True)
class Projection:
    """x @ weight + bias with constants: x [b, L, in], weight [in, out], bias [out] or none."""

    source: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    output: ir.Value

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The Add, where there is one, and the MatMul."""
        node = self.output.producer()
        product = producer(self.output, "MatMul") or next(
            (found for value in (node.inputs if node else ()) if (found := producer(value, "MatMul"))), None
        )
        return tuple(dict.fromkeys(found for found in (node, product) if found is not None))


@dataclass(frozen=True)
class Core:
    """softmax(scale * Q K^T + biases) V of one layer."""

    query: ir.Value
    """[b, L, heads * width], before the heads are split."""
    key: ir.Value
    """[b, L, heads * width]."""
    value: ir.Value
    """[b, L, heads * width]."""
    heads: int
    """Number of heads."""
    scale: float
    """Product of all factors on Q, K and the scores."""
    factors: tuple[ir.Node, ...]
    """The Mul and Div nodes that apply the scale; empty for an `Attention` operator."""
    biases: tuple[ir.Value, ...]
    """What is added to the scores [b, heads, L, L], in order."""
    operator: ir.Node
    """The Softmax or the `Attention` operator."""
    output: ir.Value
    """[b, L, heads * width], the heads joined again."""

    @property
    def single(self) -> bool:
        """It is one `Attention` operator on [b, L, heads * width], without transposes around it."""
        return self.operator.op_type == "Attention" and self.output.producer() is self.operator


def find_cores(graph: ir.Graph) -> list[Core]:
    """All attention cores in the order in which they run."""
    found = []
    for node in graph:
        core = None
        if producer(node.outputs[0], "Softmax"):
            core = _decomposed(node)
        elif producer(node.outputs[0], "Attention"):
            core = _operator(node)
        if core is not None:
            found.append(core)
    return found


def projection(value: ir.Value) -> Projection | None:
    """The linear layer that makes a value, None where it is anything else."""
    bias: ir.Value | None = None
    product = producer(value, "MatMul")
    if product is None:
        node = producer(value, "Add")
        if node is None:
            return None
        for first, second in operands(node):
            array = constant(second)
            if array is not None and array.ndim == 1 and (product := producer(first, "MatMul")) is not None:
                bias = second
                break
    if product is None:
        return None
    source, weight = product.inputs[0], product.inputs[1]
    array = constant(weight)
    if source is None or weight is None or array is None or array.ndim != 2:
        return None
    return Projection(source, weight, bias, value)


def merged(core: Core) -> tuple[ir.Node, Projection] | None:
    """The Split on the last axis and the one product that Q, K and V come from, None while they are separate."""
    node = producer(core.query, "Split")
    if node is None or tuple(node.outputs) != (core.query, core.key, core.value):
        return None
    source = node.inputs[0]
    axes = rank(source)
    if source is None or attribute(node, "axis", 0) not in {-1, None if axes is None else axes - 1}:
        return None
    found = projection(source)
    return None if found is None else (node, found)


def layer_names(cores: Sequence[Core]) -> list[str]:
    """The name of each core's attention, `layer.N.attention`."""
    return [f"layer.{number}.attention" for number in range(len(cores))]


def _decomposed(softmax: ir.Node) -> Core | None:
    scores = _scores(softmax.inputs[0])
    context = _reader(softmax.outputs[0], "MatMul")
    if scores is None or context is None or context.inputs[0] is not softmax.outputs[0]:
        return None
    product, scale, factors, biases = scores
    query, on_query, more_query = _scaled(product.inputs[0])
    key, on_key, more_key = _scaled(product.inputs[1])
    split_query, split_key, split_value = _split_heads(query), _split_keys(key), _split_heads(context.inputs[1])
    if split_query is None or split_key is None or split_value is None:
        return None
    joined = _join_heads(context.outputs[0])
    heads = {split_query[1], split_key[1], split_value[1]}
    if joined is None or len(heads) != 1:
        return None
    return Core(
        query=split_query[0],
        key=split_key[0],
        value=split_value[0],
        heads=heads.pop(),
        scale=scale * on_query * on_key,
        factors=(*factors, *more_query, *more_key),
        biases=biases,
        operator=softmax,
        output=joined,
    )


def _operator(node: ir.Node) -> Core | None:
    """An `Attention` operator without a cache: 3-D as this package makes it, or 4-D as torch.onnx does."""
    query, key, value, mask, *rest = [*node.inputs, None, None][:7]
    plain = not attribute(node, "is_causal", 0) and not attribute(node, "softcap", 0.0) and len(node.outputs) == 1
    if query is None or key is None or value is None or any(rest) or not plain:
        return None
    output: ir.Value | None
    if rank(query) == 4:
        splits = [split for entry in (query, key, value) if (split := _split_heads(entry)) is not None]
        output = _join_heads(node.outputs[0])
        if output is None or len(splits) != 3 or len({heads for _, heads in splits}) != 1:
            return None
        query, key, value = (split[0] for split in splits)
        heads = splits[0][1]
    else:
        heads = int(attribute(node, "q_num_heads", 0))
        output = node.outputs[0]
        if heads < 1 or attribute(node, "kv_num_heads", 0) != heads:
            return None
    width, scale = size(query, -1), attribute(node, "scale")
    if scale is None and width is None:
        return None
    factor = float(scale) if scale is not None else (heads / (width or heads)) ** 0.5
    biases = () if mask is None else (mask,)
    return Core(query, key, value, heads, factor, (), biases, node, output)


def _scores(
    value: ir.Value | None,
) -> tuple[ir.Node, float, tuple[ir.Node, ...], tuple[ir.Value, ...]] | None:
    """From the softmax's input back to Q K^T: the product, the scale, its nodes and what was added, in order."""
    product = producer(value, "MatMul")
    if product is not None:
        # A product with constants is a projection, not scores.
        return None if constant(product.inputs[1]) is not None else (product, 1.0, (), ())
    node = producer(value, "Add")
    if node is not None:
        for inner, bias in operands(node):
            if (found := _scores(inner)) is not None:
                return (*found[:3], (*found[3], bias))
        return None
    unscaled, factor, nodes = _scaled(value)
    # A factor after a bias would scale the bias too; then this is no scaled score.
    if nodes and (found := _scores(unscaled)) is not None and not found[3]:
        return found[0], found[1] * factor, (*found[2], *nodes), ()
    return None


def _scaled(value: ir.Value | None) -> tuple[ir.Value | None, float, tuple[ir.Node, ...]]:
    """A value without one Mul or Div by a constant number, that number, and the node."""
    node = producer(value, "Mul")
    if node is not None:
        for inner, factor in operands(node):
            if (number := scalar(factor)) is not None:
                return inner, number, (node,)
    node = producer(value, "Div")
    if node is not None and (number := scalar(node.inputs[1])):
        return node.inputs[0], 1.0 / number, (node,)
    return value, 1.0, ()


def _split_heads(value: ir.Value | None, perm: tuple[int, ...] = HEADS_OUT) -> tuple[ir.Value, int] | None:
    """[b, heads, L, width] back to [b, L, heads * width] and the number of heads."""
    node = producer(value, "Transpose")
    if node is None or attribute(node, "perm") != perm:
        return None
    shaped = node.inputs[0]
    view = producer(shaped, "Reshape")
    if shaped is None or view is None or view.inputs[0] is None:
        return None
    heads = size(shaped, 2)
    return (view.inputs[0], heads) if rank(shaped) == 4 and heads else None


def _split_keys(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """The same for K^T, [b, heads, width, L]."""
    direct = _split_heads(value, KEYS_OUT)
    if direct is not None:
        return direct
    node = producer(value, "Transpose")
    if node is not None and attribute(node, "perm") == (0, 1, 3, 2):
        return _split_heads(node.inputs[0])
    return _split_heads(flat_keys(value))


def flat_keys(value: ir.Value | None) -> ir.Value | None:
    """K [b, h, L, w] behind torch.onnx's own spelling of its transpose below opset 23.

    [b, h, L, w] -> [b * h, L, w] -> [b * h, w, L] -> [b, h, w, L]: onnxscript writes it for
    scaled_dot_product_attention (function_libs/torch_lib/ops/nn.py).
    """
    back = producer(value, "Reshape")
    turn = producer(back.inputs[0], "Transpose") if back else None
    flat = producer(turn.inputs[0], "Reshape") if turn and attribute(turn, "perm") == (0, 2, 1) else None
    if back is None or flat is None or flat.inputs[0] is None:
        return None
    keys = flat.inputs[0]
    # Both shapes must come from the keys' own shape: nothing else makes the detour equal to a plain transpose.
    for shape in (back.inputs[1], flat.inputs[1]):
        if not any(node.op_type == "Shape" and node.inputs[0] is keys for node in walk_back([shape])):
            return None
    return keys


def _join_heads(value: ir.Value) -> ir.Value | None:
    """[b, heads, L, width] onwards to [b, L, heads * width]."""
    node = _reader(value, "Transpose")
    if node is None or attribute(node, "perm") != HEADS_OUT:
        return None
    view = _reader(node.outputs[0], "Reshape")
    return None if view is None or rank(view.outputs[0]) != 3 else view.outputs[0]


def _reader(value: ir.Value, operator: str) -> ir.Node | None:
    """The one node that reads a value, if it is this operator."""
    readers = [usage.node for usage in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == operator else None
