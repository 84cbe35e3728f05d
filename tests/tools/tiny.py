"""A tiny random BERT of each task with a real vocabulary, as a folder that its own library opens too.

`builders/samples.py` has every family, but its texts are numbered words: offsets, subwords and scripts need these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders.settings import ModelSettings
from builders.source import open_source
from tests.conftest import MINILM

#: Longest text of these models, tokens.
LIMIT = 64
#: Width of their vectors.
WIDTH = 32
CLASSES = {0: "calm", 1: "glad", 2: "sad"}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
_HEADS = {
    "classification": "BertForSequenceClassification",
    "reranking": "BertForSequenceClassification",
    "tagging": "BertForTokenClassification",
    "answering": "BertForQuestionAnswering",
}
TASKS = ("embedding", *_HEADS)


def tiny_model(folder: Path, task: str) -> Path:
    """Write a model of two small layers with the default model's vocabulary.

    Args:
        folder: where to; made.
        task: one of `TASKS`; the embedding model is a folder of sentence-transformers, mean pooled and normalised.
    """
    import torch
    import transformers

    torch.manual_seed(TASKS.index(task))
    labels: dict[str, Any] = {
        "classification": {"id2label": CLASSES, "label2id": {name: number for number, name in CLASSES.items()}},
        "reranking": {"num_labels": 1},
        "tagging": {"id2label": TAGS, "label2id": {name: number for number, name in TAGS.items()}},
    }.get(task, {})
    config = transformers.BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=WIDTH * 2,
        max_position_embeddings=LIMIT,
        initializer_range=0.3,  # far from the usual 0.02: the answers of random weights must differ
        **labels,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        open_source(ModelSettings(source=MINILM)).folder, model_max_length=LIMIT
    )
    model = getattr(transformers, _HEADS.get(task, "BertModel"))(config).eval()
    plain = folder / "plain" if task == "embedding" else folder
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    if task == "embedding":
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

        modules = [Transformer(str(plain), max_seq_length=LIMIT), Pooling(WIDTH, "mean"), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder / "whole"))
        return folder / "whole"
    return folder
