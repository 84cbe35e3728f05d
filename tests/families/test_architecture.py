"""What config.json alone says, family by family, and what it is refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.errors import SourceError
from builders.families import FAMILIES, Architecture, read_architecture
from tests.families.models import CONFIGS, GENERIC, LAYERS, LIMIT, WORDS

FOLDER = Path("model")
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
ROBERTA = BERT | {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
MODERNBERT = BERT | {"model_type": "modernbert", "max_position_embeddings": 8192, "pad_token_id": 50283}


def read(config: dict[str, Any]) -> Architecture:
    return read_architecture(config, FOLDER)


def test_every_family_has_a_test() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def test_bert_is_read_as_its_config_says() -> None:
    assert read(BERT) == Architecture(
        family="bert",
        hidden_size=768,
        layers=12,
        heads=12,
        vocab_size=30522,
        positions=512,
        table_positions=512,
        first_position=0,
        pad_id=0,
        segments=2,
        learned_positions=True,
        local_window=None,
        traits=frozenset({"learned_positions"}),
    )


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_limit_is_positions_less_pad_and_one_when_numbering_is_robertas(family: str) -> None:
    """CASES 1 and 2: 514 rows are 512 tokens, and with another padding token fewer."""
    found = read(ROBERTA | {"model_type": family})
    assert (found.positions, found.table_positions, found.first_position) == (512, 514, 2)
    assert found.segments == (0 if family == "mpnet" else 1)
    moved = read(ROBERTA | {"model_type": family, "pad_token_id": 5})
    assert (moved.positions, moved.first_position, moved.pad_id) == (508, 6, 5)
    # Without a padding token in the config, the family's own.
    assert read({**ROBERTA, "model_type": family, "pad_token_id": None}).first_position == 2


def test_distilbert_is_read_by_its_own_names() -> None:
    config = {key: value for key, value in BERT.items() if key not in ("hidden_size", "num_hidden_layers")}
    found = read(config | {"model_type": "distilbert", "dim": 384, "n_layers": 6, "n_heads": 8})
    assert (found.hidden_size, found.layers, found.heads, found.segments) == (384, 6, 8, 0)
    with pytest.raises(SourceError, match=r"dim of .*config\.json is no positive integer"):
        read(config | {"model_type": "distilbert", "n_layers": 6, "n_heads": 8})


def test_deberta_has_no_table_when_its_input_is_not_biased_by_positions() -> None:
    third = read(BERT | {"model_type": "deberta-v2", "position_biased_input": False, "type_vocab_size": 0})
    assert (third.positions, third.table_positions, third.learned_positions, third.segments) == (512, 0, False, 0)
    assert third.traits == frozenset()
    second = read(BERT | {"model_type": "deberta-v2", "conv_kernel_size": 3})
    assert (second.table_positions, second.learned_positions, second.segments) == (512, True, 2)
    assert second.traits == {"learned_positions", "convolution"}


def test_modernbert_has_a_window_when_some_layers_are_local() -> None:
    found = read(MODERNBERT)
    assert (found.positions, found.table_positions, found.learned_positions, found.segments) == (8192, 0, False, 0)
    assert (found.local_window, found.pad_id) == (128, 50283)
    assert read(MODERNBERT | {"local_attention": 64}).local_window == 64
    assert read(MODERNBERT | {"global_attn_every_n_layers": 1}).local_window is None
    assert read(MODERNBERT | {"layer_types": ["full_attention"] * 12}).local_window is None
    assert read(MODERNBERT | {"hidden_activation": "silu"}).traits == {"local_attention", "no_gelu"}


def test_generic_row_is_read_from_the_model_that_transformers_makes() -> None:
    albert = read(GENERIC["albert"] | {"model_type": "albert"})
    assert (albert.generic, albert.layers, albert.vocab_size) == (True, LAYERS, WORDS)
    assert (albert.positions, albert.table_positions, albert.segments, albert.traits) == (LIMIT, LIMIT, 2, frozenset())
    # RoBERTa's numbering is found in the model itself.
    behind = read(GENERIC["data2vec-text"] | {"model_type": "data2vec-text"})
    assert (behind.positions, behind.table_positions, behind.first_position) == (LIMIT, LIMIT + 2, 2)
    turned = read(GENERIC["nomic_bert"] | {"model_type": "nomic_bert"})
    assert (turned.positions, turned.table_positions, turned.learned_positions) == (LIMIT, 0, False)
    # Its own names for the sizes go through the config class.
    named = read(GENERIC["xlm"] | {"model_type": "xlm"})
    assert (named.hidden_size, named.layers, named.heads) == (32, LAYERS, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"it is a decoder: a token sees only those before it .*'gpt2'.*bidirectional encoders",
        ),
        ({"model_type": "llama"}, r"it is a decoder.*'llama'"),
        ({"is_decoder": True}, r"it is a decoder.*\(is_decoder\).*'bert'"),
        ({"architectures": ["BertForCausalLM"]}, r"weights are those of a decoder.*BertForCausalLM"),
        ({"model_type": "t5", "is_encoder_decoder": True}, r"encoder-decoder \(is_encoder_decoder\).*'t5'"),
        ({"model_type": "bart"}, r"it is an encoder-decoder .*'bart'"),
        ({"model_type": "vit"}, r"it is no text encoder .*'vit'"),
        ({"model_type": "nonsense"}, r"transformers does not know its model_type .*'nonsense'"),
        ({"model_type": None}, r"model_type of .*config\.json is not served; limit: supported: bert, cam"),
        (
            {"model_type": "big_bird"},
            r"its attention is sparse for long texts alone \(attention_type\).*'block_sparse'",
        ),
        ({"model_type": "fnet"}, r"its forward takes no attention_mask .*'fnet'"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, r"custom code \(auto_map\).*trust_remote_code is never on"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config of .* is not served.*plain weights"),
        ({"add_cross_attention": True}, r"add_cross_attention of .* is not served"),
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type of .*'relative_key'"),
        ({"vocab_size": 0}, r"vocab_size of .* is no positive integer: 0"),
        ({"type_vocab_size": -1}, r"type_vocab_size of .* is no integer: -1"),
        ({"max_position_embeddings": "512"}, r"max_position_embeddings of .* is no positive integer: '512'"),
        (
            {"model_type": "roberta", "max_position_embeddings": 2, "pad_token_id": 1},
            r"leaves no position for a token: 2; limit: more than 2",
        ),
    ],
)
def test_config_is_refused_with_its_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read(BERT | change)


def test_row_is_generic_only_without_a_family_of_its_own() -> None:
    found = read(BERT)
    assert not found.generic
    assert replace(found, family="albert").generic
