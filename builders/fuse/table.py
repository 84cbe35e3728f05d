"""What each family's graph must hold once it is fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from builders.errors import FuseError
from builders.fuse.sites import Found


@dataclass(frozen=True)
class Sites:
    """Expected sites in the final graph."""

    qkv: int = 0
    """Products that make Q, K and V of a layer at once."""
    attention: int = 0
    """Attention cores, decomposed or one operator."""
    attention_operator: int = 0
    """Attention cores that are one `Attention` operator."""
    scale_mask: int = 0
    """Attention cores without a scale of their own."""
    gelu: int = 0
    """Gelu operators on token vectors, [b, L, width]; a head's on one vector per text are not counted."""
    layer_norm: int = 0
    """LayerNormalization operators on token vectors."""
    positions: int = 0
    """Position tables that are sliced or looked up by distance, rotary ones (cosine, sine) included."""


@dataclass(frozen=True)
class FamilyTable:
    """Sites of a family as a function of its layers: so many per layer and so many beside them."""

    per_layer: Sites
    once: Sites
    traits: Mapping[str, Sites] = field(default_factory=dict)
    """What a trait of the config, or of the head, adds beside the layers."""
    why: str = ""
    """Why the family lacks sites that others have."""

    def expected(self, layers: int, traits: Collection[str] = ()) -> Sites:
        """The sites of a model with this many transformer blocks."""
        per_layer, once = asdict(self.per_layer), asdict(self.once)
        if "no_gelu" in traits:
            per_layer["gelu"] = 0
        more = [asdict(sites) for name, sites in self.traits.items() if name in traits]
        return Sites(
            **{kind: per_layer[kind] * layers + once[kind] + sum(sites[kind] for sites in more) for kind in per_layer}
        )


# Post-norm blocks: one attention, one feed-forward with GELU, a LayerNorm behind each; one behind the embeddings.
_BLOCK = Sites(qkv=1, attention=1, attention_operator=1, scale_mask=1, gelu=1, layer_norm=2)
_NORM = Sites(layer_norm=1)
_POSITIONS = Sites(positions=1)


def _post_norm(positions: int = 1) -> FamilyTable:
    return FamilyTable(_BLOCK, replace(_NORM, positions=positions))


_DEBERTA = FamilyTable(
    Sites(gelu=1, layer_norm=2),
    _NORM,
    # Without a learned table (v3) positions are the relative buckets alone, looked up inside each attention.
    traits={"learned_positions": _POSITIONS, "convolution": _NORM},
    why="disentangled attention adds products of content and positions to the scores and masks them by a choice, "
    "where the steps know one product, a scale and added masks",
)

TABLE: Mapping[str, FamilyTable] = MappingProxyType(
    {
        "bert": _post_norm(),
        "camembert": _post_norm(),
        "deberta": _DEBERTA,
        "deberta-v2": _DEBERTA,
        "distilbert": _post_norm(),
        "electra": _post_norm(),
        "modernbert": FamilyTable(
            Sites(gelu=1, layer_norm=2),
            # The norm in front of the first attention is none; there is one behind the last layer. Cosine and sine.
            Sites(layer_norm=1, positions=2),
            # The head of tagging and answering works on every token; that of classification on one vector.
            traits={"local_attention": Sites(positions=2), "token_head": Sites(gelu=1, layer_norm=1)},
            why="Q, K and V are one product already (Wqkv), and are turned by their positions before the scores: the "
            "steps know cores that begin at the product, and a scale folded into it would be turned with it",
        ),
        # The learned table and the relative bias.
        "mpnet": _post_norm(positions=2),
        "roberta": _post_norm(),
        "xlm-roberta": _post_norm(),
    }
)
"""Families whose fusion is proven (tests/fuse, tests/families), by `model_type` of config.json."""


def expected_sites(family: str, layers: int, traits: Collection[str] = ()) -> dict[str, int]:
    """Expected sites by kind; empty for a family without a row: its sites are fused as found, and only reported.

    Args:
        family: `model_type` of config.json.
        layers: transformer blocks.
        traits: of the config (`Architecture.traits`), and `token_head` for a task that answers for each token.
    """
    return asdict(TABLE[family].expected(layers, traits)) if family in TABLE else {}


def check_sites(family: str, layers: int, found: Found, kinds: Collection[str], traits: Collection[str] = ()) -> None:
    """Compare what a graph holds with its family's table; a family without a row passes.

    Args:
        family: `model_type` of config.json.
        layers: transformer blocks.
        found: what the final graph holds.
        kinds: the kinds that the steps of this build answer for.
        traits: see `expected_sites`.

    Raises:
        FuseError: a count differs; it names found and expected counts and the pattern that was found instead.
    """
    expected = expected_sites(family, layers, traits)
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
