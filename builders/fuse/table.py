"""What each family's graph must hold once it is fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from builders.errors import FuseError
from builders.fuse.sites import Found


@dataclass(frozen=True)
class Sites:
    """Expected sites in the final graph."""

    qkv: int
    """Products that make Q, K and V of a layer at once."""
    attention: int
    """Attention cores, decomposed or one operator."""
    attention_operator: int
    """Attention cores that are one `Attention` operator."""
    scale_mask: int
    """Attention cores without a scale of their own."""
    gelu: int
    """Gelu operators."""
    layer_norm: int
    """LayerNormalization operators."""
    positions: int
    """Position tables that are sliced or looked up by distance."""


@dataclass(frozen=True)
class FamilyTable:
    """Sites of a family as a function of its layers: so many per layer and so many beside them."""

    per_layer: Sites
    once: Sites

    def expected(self, layers: int) -> Sites:
        """The sites of a model with this many transformer blocks."""
        per_layer, once = asdict(self.per_layer), asdict(self.once)
        return Sites(**{kind: per_layer[kind] * layers + once[kind] for kind in per_layer})


# Post-norm blocks: one attention, one feed-forward with GELU, a LayerNorm behind each; one behind the embeddings.
_BLOCK = Sites(qkv=1, attention=1, attention_operator=1, scale_mask=1, gelu=1, layer_norm=2, positions=0)


def _post_norm(positions: int) -> FamilyTable:
    once = Sites(qkv=0, attention=0, attention_operator=0, scale_mask=0, gelu=0, layer_norm=1, positions=positions)
    return FamilyTable(_BLOCK, once)


TABLE: Mapping[str, FamilyTable] = MappingProxyType(
    {
        "bert": _post_norm(positions=1),
        "distilbert": _post_norm(positions=1),
        # The learned table and the relative bias.
        "mpnet": _post_norm(positions=2),
        "roberta": _post_norm(positions=1),
        "xlm-roberta": _post_norm(positions=1),
    }
)
"""Families whose fusion is proven (tests/fuse), by `model_type` of config.json."""


def expected_sites(family: str, layers: int) -> dict[str, int]:
    """Expected sites by kind.

    Raises:
        FuseError: the family has no table.
    """
    if family not in TABLE:
        raise FuseError(
            "no table of fusions for this family",
            value=family,
            limit=f"known: {', '.join(sorted(TABLE))}",
            remedy="use a model of a known family, or add its row to builders/fuse/table.py",
        )
    return asdict(TABLE[family].expected(layers))


def check_sites(family: str, layers: int, found: Found, kinds: Collection[str]) -> None:
    """Compare what a graph holds with its family's table.

    Args:
        family: key of `TABLE`.
        layers: transformer blocks.
        found: what the final graph holds.
        kinds: the kinds that the steps of this build answer for.

    Raises:
        FuseError: a count differs; it names found and expected counts and the pattern that was found instead.
    """
    expected = expected_sites(family, layers)
    wrong = [kind for kind in expected if kind in kinds and found.sites[kind] != expected[kind]]
    if not wrong:
        return
    differences = [f"{kind} {found.sites[kind]} of {expected[kind]}, found {found.instead[kind]}" for kind in wrong]
    raise FuseError(
        f"the fused graph lacks sites of its family's table ({family}, {layers} layers)",
        value="; ".join(differences),
        limit=", ".join(f"{kind} {expected[kind]}" for kind in expected if kind in kinds),
        remedy="export with eager attention and this project's versions, or leave the steps out with --skip",
    )
