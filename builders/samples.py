"""Small encoders with random weights, one for each family and task: what the test matrix runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from builders.families import FAMILIES
from builders.tasks import Task

if TYPE_CHECKING:
    import torch

#: Layers, width, heads and words. Heads of width 12: their scale, 0.2887, is no power of two.
LAYERS, HIDDEN, HEADS, WORDS = 3, 48, 4, 300
LABELS = 3
#: First token number that is no special token of any family.
FIRST_WORD = 5
_SPREAD = 0.2

Head = Literal["", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
HEADS_OF: Mapping[Task, Head] = MappingProxyType(
    {
        "embedding": "",
        "classification": "ForSequenceClassification",
        "reranking": "ForSequenceClassification",
        "tagging": "ForTokenClassification",
        "answering": "ForQuestionAnswering",
    }
)
"""What each task's class of transformers is called behind `AutoModel`."""

# What is particular about a family, as config.json says it; small enough for texts of 40 tokens to meet it.
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deberta": {"relative_attention": True, "max_relative_positions": 20, "pos_att_type": ["c2p", "p2c"]},
        "deberta-v2": {
            "relative_attention": True,
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        "electra": {"embedding_size": 24},
        "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "intermediate_size": 64},
    }
)


def sample_families() -> tuple[str, ...]:
    """All families with a row of their own."""
    return tuple(sorted(FAMILIES))


def write_sample(
    folder: Path, family: str, task: Task, *, positions: int = 40, layers: int = LAYERS, seed: int = 0
) -> torch.nn.Module:
    """Write config.json, model.safetensors and tokenizer.json of a random model; equal seeds give equal weights.

    Args:
        folder: where to; it is made if it is missing.
        family: `model_type`, a key of `FAMILIES`.
        task: decides the head and the number of labels.
        positions: longest text, tokens.
        layers: transformer blocks.
        seed: of the weights.

    Returns:
        The model itself, eager, FP32, in eval mode.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    from builders.backbone import quiet_transformers

    row = FAMILIES[family]
    pad_id = 1 if row.positions_after_pad else 0
    sizes = {row.hidden_size: HIDDEN, row.layers: layers, row.heads: HEADS}
    wide = {"hidden_dim": 96} if family == "distilbert" else {"intermediate_size": 96}
    labels = {"classification": LABELS, "tagging": LABELS, "reranking": 1}.get(task)
    options = {
        "vocab_size": WORDS,
        "max_position_embeddings": positions + (pad_id + 1 if row.positions_after_pad else 0),
        "pad_token_id": pad_id,
        **sizes,
        **wide,
        **_OWN.get(family, {}),
        **({} if labels is None else {"num_labels": labels}),
        **_special(family),
    }
    config = AutoConfig.for_model(family, **options)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: torch.nn.Module = getattr(transformers, f"AutoModel{HEADS_OF[task]}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms too: equal zeros and ones would hide a bias that is lost or put elsewhere.
            parameter.add_(torch.randn_like(parameter) * _SPREAD)
    model.float().eval().requires_grad_(False)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(pad_id)), encoding="utf-8")
    return model


def _special(family: str) -> dict[str, int]:
    """Numbers of special tokens within the small vocabulary, where a config class has larger ones."""
    if family != "modernbert":
        return {}
    return {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


def _tokenizer(pad_id: int) -> dict[str, Any]:
    """Words w0, w1, ...; a text is [CLS] text [SEP], a pair [CLS] text [SEP] text [SEP]."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if pad_id == 1:
        names[:2] = ["[UNK]", "[PAD]"]
    vocab = {name: number for number, name in enumerate(names)}
    vocab |= {f"w{number}": number for number in range(len(names), WORDS)}
    special = {name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}

    def token(name: str, kind: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    single = [token("[CLS]"), first, token("[SEP]")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[name],
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name in names
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, second, token("[SEP]", 1)],
            "special_tokens": special,
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
