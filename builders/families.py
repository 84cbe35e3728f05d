"""What config.json says of an encoder: its family, sizes, positions and token types; kinds not served are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from builders.errors import SourceError

MaskForm = Literal["additive", "windows", "own"]
"""How the attention mask is handed to a model: as numbers added to the scores, [b, 1, 1, L]; as one such mask for each
kind of layer (ModernBERT); or as the plain [b, L] mask of which the model makes its own."""


@dataclass(frozen=True)
class Family:
    """What differs between encoder families as far as config.json and the graph's inputs are concerned."""

    positions_after_pad: bool = False
    """Positions start at pad_id + 1 (RoBERTa's numbering) instead of at 0."""
    segments: int = 2
    """Token types where the config names no `type_vocab_size`."""
    token_types: bool = True
    """The forward takes token types at all."""
    pad_id: int = 0
    """Padding token when config.json names none."""
    hidden_size: str = "hidden_size"
    """Key of config.json with the width of a token vector."""
    layers: str = "num_hidden_layers"
    """Key with the number of transformer blocks."""
    heads: str = "num_attention_heads"
    """Key with the number of attention heads."""
    learned: bool | str = True
    """Absolute positions come from a learned table; a key of config.json where that depends on it (true without it)."""
    activation: str = "hidden_act"
    """Key with the feed-forward's activation; "gelu" where it is missing."""
    mask: MaskForm = "additive"
    """How the mask is handed over."""


# RoBERTa's own token types are one row of zeros' type: looked up once, at export, like BERT's.
_ROBERTA = Family(positions_after_pad=True, segments=1, pad_id=1)
# With `position_biased_input` false (DeBERTa-v3) only the relative buckets are left; they need no table of positions.
_DEBERTA = Family(segments=0, learned="position_biased_input", mask="own")

GELUS = frozenset({"gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh"})
"""Activations of transformers that are a GELU, by Erf or by its tanh approximation."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family(),
        "camembert": _ROBERTA,
        "deberta": _DEBERTA,
        "deberta-v2": _DEBERTA,
        "distilbert": Family(
            token_types=False, hidden_size="dim", layers="n_layers", heads="n_heads", activation="activation"
        ),
        "electra": Family(),
        "modernbert": Family(
            token_types=False, pad_id=50283, learned=False, activation="hidden_activation", mask="windows"
        ),
        "mpnet": Family(positions_after_pad=True, token_types=False, pad_id=1),
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
    }
)
"""Families with a row of their own, by `model_type` of config.json; each is tested in tests/families."""


@dataclass(frozen=True)
class Architecture:
    """An encoder as its config.json describes it."""

    family: str
    """`model_type` of config.json; a key of `FAMILIES`, or another encoder that transformers knows."""
    hidden_size: int
    """Width of a token vector."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads of a block."""
    vocab_size: int
    """Rows of the token table: token numbers from 0 on."""
    positions: int
    """Longest text, tokens, before tiling: for RoBERTa's numbering the table without its first pad_id + 1 rows."""
    table_positions: int
    """Rows of the learned position table, unusable ones included; 0 when there is none."""
    first_position: int
    """Position of the first token: pad_id + 1 for RoBERTa's numbering, else 0."""
    pad_id: int
    """Padding token."""
    segments: int
    """Token types that the forward takes; 0 when it takes none."""
    learned_positions: bool
    """Absolute positions come from a learned table, which can be tiled."""
    local_window: int | None
    """`local_attention` of config.json, tokens, where some layers see only that far; None when every layer sees all."""
    traits: frozenset[str] = frozenset()
    """What of the config changes the fused sites, by the names of builders/fuse/table.py; empty without a row."""

    @property
    def generic(self) -> bool:
        """The family has no row of its own: its graph must pass the checks of builders/invariance.py."""
        return self.family not in FAMILIES


def read_architecture(config: dict[str, Any], folder: Path) -> Architecture:
    """Read config.json. Nothing of the model is loaded; transformers is asked only for a family without a row.

    Args:
        config: the parsed file.
        folder: its folder, for messages.

    Raises:
        SourceError: the model is of a kind that is not served, or a size is missing; the message says why.
    """
    name = _check_kind(config, folder)
    if name not in FAMILIES:
        from builders.generic import read_generic

        return _check_positions(read_generic(name, config, folder), folder)
    family = FAMILIES[name]
    found_pad = config.get("pad_token_id")
    pad_id = found_pad if isinstance(found_pad, int) else family.pad_id
    stored = integer(config, "max_position_embeddings", folder)
    first = pad_id + 1 if family.positions_after_pad else 0
    learned = config.get(family.learned, True) is True if isinstance(family.learned, str) else family.learned
    segments = 0
    if family.token_types:
        segments = integer({"type_vocab_size": family.segments} | config, "type_vocab_size", folder, least=0)
    local_window = _local_window(config, folder) if family.mask == "windows" else None
    read = Architecture(
        family=name,
        hidden_size=integer(config, family.hidden_size, folder),
        layers=integer(config, family.layers, folder),
        heads=integer(config, family.heads, folder),
        vocab_size=integer(config, "vocab_size", folder),
        positions=stored - first,
        table_positions=stored if learned else 0,
        first_position=first,
        pad_id=pad_id,
        segments=segments,
        learned_positions=learned,
        local_window=local_window,
        traits=_traits(config, family, learned=learned, local=local_window is not None),
    )
    return _check_positions(read, folder)


def integer(config: Mapping[str, Any], key: str, folder: Path, *, least: int = 1) -> int:
    """A whole number of config.json.

    Raises:
        SourceError: it is missing, no integer or below `least`.
    """
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SourceError(
            f"{key} of {folder / 'config.json'} is no {'positive ' if least else ''}integer",
            value=value,
            remedy="save the model's config again",
        )
    return value


def refuse(reason: str, value: object, folder: Path) -> NoReturn:
    """Say why a model is not served.

    Raises:
        SourceError: always.
    """
    raise SourceError(
        f"the model is not served: {reason} ({folder / 'config.json'})",
        value=value,
        limit=f"bidirectional encoders: {', '.join(sorted(FAMILIES))}, and others of transformers that pass the checks",
        remedy="use another model",
    )


def _local_window(config: dict[str, Any], folder: Path) -> int | None:
    """ModernBERT's local attention; the defaults are those of its config class."""
    kinds = config.get("layer_types")
    every = config.get("global_attn_every_n_layers", 3)
    local = "sliding_attention" in kinds if isinstance(kinds, list) else every != 1
    return integer({"local_attention": 128} | config, "local_attention", folder) if local else None


def _traits(config: dict[str, Any], family: Family, *, learned: bool, local: bool) -> frozenset[str]:
    traits = {
        "no_gelu": config.get(family.activation, "gelu") not in GELUS,
        "learned_positions": learned,
        "local_attention": local,
        "convolution": (config.get("conv_kernel_size") or 0) > 0,
    }
    return frozenset(name for name, there in traits.items() if there)


def _check_positions(found: Architecture, folder: Path) -> Architecture:
    if found.positions < 1:
        raise SourceError(
            f"max_position_embeddings of {folder / 'config.json'} leaves no position for a token",
            value=found.positions + found.first_position,
            limit=f"more than {found.first_position}: positions start behind pad_token_id {found.pad_id}",
            remedy="save the model's config again",
        )
    return found


def _check_kind(config: dict[str, Any], folder: Path) -> str:
    """The `model_type`, after everything in config.json that this project does not serve was refused."""
    where = str(folder / "config.json")
    if "auto_map" in config:
        raise SourceError(
            "config.json names custom code (auto_map)",
            value=config["auto_map"],
            limit="trust_remote_code is never on",
            remedy="use a model whose architecture is part of transformers",
        )
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise SourceError(
            f"model_type of {where} is not served",
            value=name,
            limit=f"supported: {', '.join(sorted(FAMILIES))}",
            remedy="use a model of a supported family",
        )
    if config.get("is_encoder_decoder", False) is not False:
        refuse("it is an encoder-decoder (is_encoder_decoder)", name, folder)
    if config.get("is_decoder", False) is not False:
        refuse("it is a decoder: a token sees only those before it (is_decoder)", name, folder)
    if causal := [entry for entry in config.get("architectures") or () if str(entry).endswith("ForCausalLM")]:
        refuse("its weights are those of a decoder (architectures)", causal, folder)
    odd = {
        "add_cross_attention": config.get("add_cross_attention", False) is not False,
        "quantization_config": config.get("quantization_config") is not None,
        "position_embedding_type": config.get("position_embedding_type") not in (None, "absolute"),
    }
    for key in (key for key, refused in odd.items() if refused):
        raise SourceError(
            f"{key} of {where} is not served",
            value=config[key],
            limit="bidirectional encoders with absolute positions of their family's own kind and plain weights",
            remedy="use another model",
        )
    return name
