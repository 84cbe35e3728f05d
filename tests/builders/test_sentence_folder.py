"""What is read of sentence-transformers folders, and what is refused; the numbers are in test_sentence_parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.errors import SourceError
from builders.sentence_folder import ACTIVATIONS, read_limits
from builders.tasks import Dense, Normalize, Shorten
from tests.builders.test_source import add_modules, made_up, opened, write

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."
PLAIN = (f"{OLD}Transformer", f"{OLD}Pooling")
MEAN = {"pooling_mode": "mean"}
DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.activation.GELU"}


def dense_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Transformer, Pooling, Normalize, Dense: the Dense in the folder `x`."""
    names = (*PLAIN, f"{OLD}Normalize", f"{OLD}Dense")
    add_modules(made_up(folder), *names, pooling=MEAN)
    write(folder / "x" / "config.json", DENSE | (config or {}))
    (folder / "x" / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, ("cls",)),
        ({"pooling_mode_max_tokens": True}, ("max",)),
        # The library's order, not the file's.
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, ("mean", "last")),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_sqrt_len_tokens": True},
         ("mean_sqrt", "weighted")),
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, ("last",)),
        ({"pooling_mode": ["cls"]}, ("cls",)),
        ({"pooling_mode": ["max", "cls", "mean_sqrt_len_tokens"]}, ("max", "cls", "mean_sqrt")),
        ({}, ("mean",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_pooling_is_read_when_keys_are_old_or_new(
    tmp_path: Path, prefix: str, pooling: dict[str, Any], expected: tuple[str, ...]
) -> None:
    add_modules(made_up(tmp_path), f"{prefix}Transformer", f"{prefix}Pooling", pooling=pooling)
    task = opened(tmp_path).task
    assert (task.pooling, task.steps, task.size) == (expected, (), 8 * len(expected))


def test_pooling_is_refused_when_unknown(tmp_path: Path) -> None:
    for mode in ("middle", ["mean", "middle"], [], 3):
        add_modules(made_up(tmp_path), *PLAIN, pooling={"pooling_mode": mode})
        with pytest.raises(SourceError, match=r"the pooling of .* is not served.*limit: cls, max, mean"):
            opened(tmp_path)


def test_modules_are_read_in_their_order(tmp_path: Path) -> None:
    task = opened(dense_folder(tmp_path)).task
    dense = Dense("x", inputs=8, outputs=4, bias=True, activation="GELU", residual=False)
    assert task.steps == (Normalize(), dense)
    assert (task.size, task.normalize) == (4, False)
    assert opened(tmp_path, normalize=True).task.steps == (Normalize(), dense, Normalize())


def test_vector_is_shortened_last_when_the_folder_says_so(tmp_path: Path) -> None:
    write(dense_folder(tmp_path) / "config_sentence_transformers.json", {"truncate_dim": 3})
    task = opened(tmp_path).task
    assert (task.steps[-1], task.size, task.normalize) == (Shorten(3), 3, False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"activation_function": "torch.nn.modules.activation.Threshold"},
            "activation of .*x is not served.*Threshold",
        ),
        ({"in_features": 16}, "Dense module in x takes vectors of another width: 16; limit: 8"),
        ({"out_features": 0}, "out_features of .* is no positive integer: 0"),
        ({"module_input_name": "token_embeddings"}, "module_input_name of .*x is not served: 'token_embeddings'"),
        ({"module_output_name": "scores"}, "module_output_name of .*x is not served: 'scores'"),
    ],
)
def test_dense_is_refused_with_the_reason(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        opened(dense_folder(tmp_path, config))


def test_dense_takes_tanh_when_its_activation_is_not_torchs(tmp_path: Path) -> None:
    (_, dense) = opened(dense_folder(tmp_path, {"activation_function": "own.Activation"})).task.steps
    assert isinstance(dense, Dense)
    assert dense.activation == "Tanh"


def test_dense_is_refused_when_its_weights_are_only_pickled(tmp_path: Path) -> None:
    (dense_folder(tmp_path) / "x" / "model.safetensors").rename(tmp_path / "x" / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"no model\.safetensors in .*x.*pytorch_model\.bin"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "x/config.json", "x/model.safetensors"])
def test_hash_changes_when_a_modules_file_does(tmp_path: Path, name: str) -> None:
    before = opened(dense_folder(tmp_path)).sha256
    with (tmp_path / name).open("a") as file:
        file.write(" ")
    assert opened(tmp_path).sha256 != before


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((*PLAIN, "custom_st.Normalize"), "not sentence-transformers' own: 'custom_st.Normalize'"),
        ((*PLAIN, f"{OLD}WordWeights"), "are not served.*WordWeights"),
        ((f"{OLD}Transformer", f"{OLD}Dense", f"{OLD}Pooling"), "are not served.*Dense"),
        ((f"{OLD}WordEmbeddings", f"{OLD}Pooling"), "are not served.*WordEmbeddings"),
        ((f"{OLD}Transformer",), "a Transformer alone"),
        ((), "are not served"),
    ],
)  # fmt: skip
def test_modules_are_refused_when_of_another_kind(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    add_modules(made_up(tmp_path), *names, pooling=MEAN)
    with pytest.raises(SourceError, match=words):
        opened(tmp_path)


@pytest.mark.parametrize("path", ["../other", "/other"])
def test_module_outside_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    made_up(tmp_path)
    write(tmp_path / "modules.json", [{"type": f"{OLD}Transformer", "path": path}])
    with pytest.raises(SourceError, match=r"outside the model's folder"):
        opened(tmp_path)


def test_prompts_are_the_folders_and_the_settings(tmp_path: Path) -> None:
    add_modules(made_up(tmp_path), *PLAIN, pooling=MEAN)
    own = {"prompts": {"query": "query: ", "document": "", "unset": None}, "default_prompt_name": "query"}
    write(tmp_path / "config_sentence_transformers.json", own)
    source = opened(tmp_path)
    assert source.task.prompts == {"query": "query: ", "document": ""}
    assert source.task.default_prompt == "query"
    other = opened(tmp_path, prompts={"document": "text: ", "title": "title: "}, default_prompt="title")
    assert other.task.prompts == {"query": "query: ", "document": "text: ", "title": "title: "}
    assert other.task.default_prompt == "title"
    assert other.sha256 != source.sha256
    with pytest.raises(
        SourceError, match=r"default prompt is none of the model's: 'titel'; limit: prompts: query, document"
    ):
        opened(tmp_path, default_prompt="titel")
    write(tmp_path / "config_sentence_transformers.json", own | {"default_prompt_name": "other"})
    with pytest.raises(SourceError, match=r"default_prompt_name .* is none of its prompts: 'other'"):
        opened(tmp_path)


def test_pooling_without_the_prompt_is_refused_when_there_is_one(tmp_path: Path) -> None:
    add_modules(made_up(tmp_path), *PLAIN, pooling=MEAN | {"include_prompt": False})
    assert opened(tmp_path).task.pooling == ("mean",)  # nothing to leave out
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    with pytest.raises(SourceError, match=r"include_prompt: false.*do not know where it ends"):
        opened(tmp_path)


def test_limits_are_those_of_the_first_file_that_says_something(tmp_path: Path) -> None:
    assert (read_limits(tmp_path).max_tokens, read_limits(tmp_path).lower_case) == (None, False)
    write(tmp_path / "sentence_xlnet_config.json", {"max_seq_length": 48, "do_lower_case": True})
    assert (read_limits(tmp_path).max_tokens, read_limits(tmp_path).lower_case) == (48, True)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32})
    assert (read_limits(tmp_path).max_tokens, read_limits(tmp_path).lower_case) == (32, False)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": "long"})
    with pytest.raises(SourceError, match=r"max_seq_length is no positive integer: 'long'.*model.max_tokens"):
        read_limits(tmp_path)


def test_every_activation_of_a_dense_module_exists_in_torch() -> None:
    import torch

    for name in ACTIVATIONS:
        assert torch.isfinite(getattr(torch.nn, name)()(torch.tensor([-1.0, 0.5]))).all(), name
