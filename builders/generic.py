"""Encoders without a row of their own: what transformers knows of their config and of the model that it makes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.families import Architecture, integer, refuse

if TYPE_CHECKING:
    import torch


def read_generic(name: str, config: dict[str, Any], folder: Path) -> Architecture:
    """Read the config of an encoder that transformers knows.

    The model is made without weights (torch's meta device), so that its own position table says where positions start.

    Args:
        name: `model_type`.
        config: the parsed config.json.
        folder: its folder, for messages.

    Raises:
        SourceError: transformers does not know it, or it is no bidirectional text encoder.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    _check_type(name, folder)
    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        made = AutoConfig.for_model(name, **rest)
        made._attn_implementation = "eager"
        with torch.device("meta"):
            model = AutoModel.from_config(made)
    except Exception as error:  # each config and model class raises its own kinds
        refuse(f"transformers cannot make a model of its config ({error})", name, folder)
    if getattr(made, "attention_type", None) == "block_sparse":
        # BigBird turns to full attention for good at its first short text, and a graph is traced with a short one.
        refuse("its attention is sparse for long texts alone (attention_type)", "block_sparse", folder)
    taken = inspect.signature(model.forward).parameters
    if missing := [key for key in ("input_ids", "attention_mask") if key not in taken]:
        refuse(f"its forward takes no {' and no '.join(missing)}", name, folder)
    # Through the config class: its attribute_map knows the family's own names of these sizes.
    sizes = {
        key: getattr(made, key, None)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    }
    vocab = getattr(made, "vocab_size", None)
    pad = getattr(made, "pad_token_id", None)
    pad_id = pad if isinstance(pad, int) else 0
    types = getattr(made, "type_vocab_size", 0)
    table = _position_table(model)
    stored = table.num_embeddings if table is not None else integer(sizes, "max_position_embeddings", folder)
    # RoBERTa's numbering shows in the table itself: the row of the padding token is never trained.
    first = table.padding_idx + 1 if table is not None and table.padding_idx is not None else 0
    return Architecture(
        family=name,
        hidden_size=integer(sizes, "hidden_size", folder),
        layers=integer(sizes, "num_hidden_layers", folder),
        heads=integer(sizes, "num_attention_heads", folder),
        vocab_size=integer({"vocab_size": vocab}, "vocab_size", folder),
        positions=stored - first,
        table_positions=stored if table is not None else 0,
        first_position=first,
        pad_id=pad_id,
        segments=types if isinstance(types, int) and "token_type_ids" in taken else 0,
        learned_positions=table is not None,
        local_window=None,
    )


def _check_type(name: str, folder: Path) -> None:
    """Only what was trained to fill in masked tokens is known to be a bidirectional text encoder."""
    from transformers.models.auto import modeling_auto

    if name not in modeling_auto.MODEL_MAPPING_NAMES:
        refuse("transformers does not know its model_type", name, folder)
    if name in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        refuse("it is an encoder-decoder", name, folder)
    if name not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        causal = name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        reason = "it is a decoder: a token sees only those before it" if causal else "it is no text encoder"
        refuse(reason, name, folder)


def _position_table(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """The learned table of absolute positions, where embeddings keep one."""
    import torch

    found = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    return found if isinstance(found, torch.nn.Embedding) else None
