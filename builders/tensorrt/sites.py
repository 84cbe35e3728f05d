"""Where a graph can be fused: the pairs and triples of nodes that one kernel should compute."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

_TRANSPARENT = frozenset({"Cast", "Identity"})
_NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization"})


@dataclass(frozen=True)
class Site:
    """Nodes of one place, by name; a kernel that covers all of them fuses it."""

    nodes: frozenset[str]
    operator: bool = False
    """The place is one operator that only a kernel of its own fuses: transposes of its inputs name it too."""


@dataclass(frozen=True)
class Sites:
    """All places of a graph, in its order."""

    attention: tuple[Site, ...]
    """Attention cores: an `Attention` node, or the product, the softmax and the product of one."""
    layer_norm_residual: tuple[Site, ...]
    """A norm and the addition of two computed tensors before it."""
    gelu_bias: tuple[Site, ...]
    """GELU (as one operator or through Erf) and the addition of a constant before it."""
    qkv: tuple[Site, ...]
    """The projections of one attention: three products of one tensor, or one product that is split in three."""


def find_sites(model: onnx_ir.Model) -> Sites:
    """Find the places in a graph, before or after `builders.precision.convert` and `lower`."""
    nodes = list(model.graph)
    return Sites(
        attention=tuple(site for node in nodes if (site := _attention(node))),
        layer_norm_residual=tuple(site for node in nodes if (site := _residual(node))),
        gelu_bias=tuple(site for node in nodes if (site := _gelu(node))),
        qkv=_projections(nodes),
    )


def _site(*nodes: onnx_ir.Node) -> Site:
    return Site(frozenset(str(node.name) for node in nodes))


def _source(value: onnx_ir.Value | None) -> onnx_ir.Node | None:
    """The node that computes a value, Casts left out."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _TRANSPARENT:
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return node


def _users(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    """The nodes that take a node's first result, Casts left out."""
    found = []
    for use in node.outputs[0].uses():
        found.extend(_users(use.node) if use.node.op_type in _TRANSPARENT else [use.node])
    return found


def _attention(node: onnx_ir.Node) -> Site | None:
    if node.op_type == "Attention":
        return Site(frozenset([str(node.name)]), operator=True)
    if node.op_type != "Softmax":
        return None
    after = [user for user in _users(node) if user.op_type == "MatMul"]
    before = _source(node.inputs[0])
    while before is not None and before.op_type in ("Add", "Mul", "Div", "Where"):
        # The scores are the computed operand; the mask has another source.
        candidates = [_source(value) for value in before.inputs]
        before = next((found for found in candidates if found and _leads_to_product(found)), None)
    if before is None or before.op_type != "MatMul" or not after:
        return None
    return _site(before, node, after[0])


def _leads_to_product(node: onnx_ir.Node, depth: int = 4) -> bool:
    if node.op_type == "MatMul":
        return True
    sources = [_source(value) for value in node.inputs] if depth and node.op_type in ("Add", "Mul", "Div") else []
    return any(_leads_to_product(found, depth - 1) for found in sources if found)


def _residual(node: onnx_ir.Node) -> Site | None:
    if node.op_type not in _NORMALIZATIONS:
        return None
    add = _source(node.inputs[0])
    if add is None or add.op_type != "Add" or not all(_source(value) for value in add.inputs):
        return None
    return _site(add, node)


def _gelu(node: onnx_ir.Node) -> Site | None:
    if node.op_type not in ("Gelu", "Erf"):
        return None
    add = _source(node.inputs[0])
    while node.op_type == "Erf" and add is not None and add.op_type in ("Div", "Mul"):
        add = _source(add.inputs[0])
    if add is None or add.op_type != "Add" or all(_source(value) for value in add.inputs):
        return None
    return _site(add, node)


def _projections(nodes: list[onnx_ir.Node]) -> tuple[Site, ...]:
    by_input: dict[str, list[onnx_ir.Node]] = defaultdict(list)
    for node in nodes:
        # A projection multiplies by a constant.
        if node.op_type == "MatMul" and node.inputs[0] is not None and _source(node.inputs[1]) is None:
            by_input[str(node.inputs[0].name)].append(node)
    found = [_site(*group) for group in by_input.values() if len(group) == 3]
    return tuple(found + [_site(node) for group in by_input.values() for node in group if _is_split(node)])


def _is_split(product: onnx_ir.Node) -> bool:
    """Whether a product, with its bias, is cut into three."""
    users = _users(product)
    users += [later for user in users if user.op_type == "Add" for later in _users(user)]
    slices = [user for user in users if user.op_type == "Slice"]
    return len(slices) == 3 or any(user.op_type == "Split" and len(user.outputs) == 3 for user in users)
