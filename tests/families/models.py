"""A tiny random model of each family in a folder, and what transformers answers for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

Floats = np.ndarray[Any, np.dtype[np.float32]]
Batch = dict[str, Any]

LAYERS, HEADS, WORDS, LIMIT, BUCKET = 2, 4, 200, 40, 16
"""Blocks, heads, tokens, longest text and a small bucket, tokens."""
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": LIMIT,
    # As far as a real model goes: random scores near 0 would hide a mask or a position that is wrong.
    "initializer_range": 0.2,
}
_BEHIND_PAD = _SIZES | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1}
_DISENTANGLED = _SIZES | {"relative_attention": True, "position_biased_input": False, "type_vocab_size": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _SIZES,
    "camembert": _BEHIND_PAD,
    "deberta": _DISENTANGLED | {"pos_att_type": ["c2p", "p2c"]},
    # As DeBERTa-v3: buckets of distances that are shorter than the texts, their table normed, keys shared.
    "deberta-v2": _DISENTANGLED
    | {"pos_att_type": "p2c|c2p", "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "distilbert": {
        "vocab_size": WORDS,
        "dim": 32,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": 48,
        "max_position_embeddings": LIMIT,
        "initializer_range": 0.2,
    },
    "electra": _SIZES | {"embedding_size": 24},
    # A window of four tokens to each side, far below the bucket; one layer of each kind.
    "modernbert": _SIZES
    | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    | dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1),
    "mpnet": {key: value for key, value in _BEHIND_PAD.items() if key != "type_vocab_size"},
    "roberta": _BEHIND_PAD,
    "xlm-roberta": _BEHIND_PAD,
}
"""By `model_type`; the others go through the generic row."""
GENERIC: dict[str, dict[str, Any]] = {
    "albert": _SIZES | {"embedding_size": 24},
    "big_bird": _SIZES | {"attention_type": "original_full"},
    "convbert": _SIZES | {"embedding_size": 32},
    "data2vec-text": _BEHIND_PAD,
    "gte": _SIZES,
    "longformer": _SIZES | {"attention_window": 8},
    "megatron-bert": _SIZES,
    "mobilebert": _SIZES | {"embedding_size": 32, "intra_bottleneck_size": 32},
    "nomic_bert": _SIZES,
    "rembert": _SIZES | {"input_embedding_size": 24, "output_embedding_size": 32},
    "roformer": _SIZES | {"embedding_size": 32},
    "xlm": {"n_words": WORDS, "emb_dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "max_position_embeddings": LIMIT},
}


def save_model(family: str, folder: Path, *, auto_class: str = "AutoModel", **options: Any) -> Path:
    """Write a random model with every parameter random, biases and norms included, and a tokenizer of words."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **({**CONFIGS, **GENERIC}[family] | options))
    model = getattr(transformers, auto_class).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        # Training leaves the padding token's row at zero.
        words = model.get_input_embeddings()
        if words.padding_idx is not None:
            words.weight[words.padding_idx] = 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of `WORDS` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    unknown = "w3"
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w4 $A w5", pair="w4 $A w5 $B:1 w5:1", special_tokens=[("w4", 4), ("w5", 5)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def batches(pad_id: int, *, segments: bool = False) -> list[Batch]:
    """Lengths 1 and 2, the edges of a bucket and the limit, each batch of several lengths; no padding token inside."""
    random = np.random.default_rng(0)
    made = []
    for width, rows in (
        (BUCKET, [1, BUCKET - 1, 2, BUCKET]),
        (2 * BUCKET, [BUCKET + 1, 5]),
        (LIMIT, [LIMIT, LIMIT - 1]),
    ):
        tokens = random.integers(6, WORDS, (len(rows), width)).astype(np.int32)
        length = np.array(rows, dtype=np.int32)[:, None]
        batch: Batch = {"input_ids": np.where(np.arange(width)[None] < length, tokens, pad_id).astype(np.int32)}
        batch["length"] = length
        if segments:
            batch["segment_start"] = length // 2
        made.append(batch)
    return made


def reference(folder: Path, batch: Batch, auto_class: str = "AutoModel") -> list[Any]:
    """What transformers answers for each text of a batch with its own mask [b, L], as tensors of the text's length."""
    import transformers

    model = getattr(transformers, auto_class).from_pretrained(folder, attn_implementation="eager").eval()
    steps = np.arange(batch["input_ids"].shape[1])[None]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": steps < batch["length"]}
    if "segment_start" in batch:
        inputs["token_type_ids"] = (steps >= batch["segment_start"]) & inputs["attention_mask"]
    with torch.no_grad():
        result = model(**{name: torch.from_numpy(array).long() for name, array in inputs.items()})
    if "start_logits" in result:
        output = torch.stack((result.start_logits, result.end_logits), dim=-1)
    else:
        output = result.logits if "logits" in result else result.last_hidden_state
    per_token = output.ndim == 3
    return [row[:length] if per_token else row for row, length in zip(output, batch["length"][:, 0], strict=True)]


def assert_close(got: Floats, expected: Floats, *, error: float = 5e-5) -> None:
    """Rows [n, size] point the same way and differ by rounding only."""
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < error
    if got.shape[1] > 1:
        cosines = (got * expected).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert cosines.min() >= 0.9999
