from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.errors import SourceError
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from tests.builders.conftest import MINILM

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def made_up(folder: Path, **config: Any) -> Path:
    """A folder that looks like a model; its weights are never loaded here."""
    write(folder / "config.json", BERT | config)
    write(folder / "tokenizer.json", {"model": {}})
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def add_modules(folder: Path, *names: str, pooling: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    entries = [{"type": name, "path": paths.get(name.rpartition(".")[2], "x")} for name in names]
    write(folder / "modules.json", entries)
    if pooling is not None:
        write(folder / "1_Pooling" / "config.json", pooling)
    return folder


def opened(folder: Path, **settings: Any) -> EncoderSource:
    return open_source(ModelSettings(source=str(folder), **settings))


def test_minilm_is_read_as_its_own_files_say(minilm_source: EncoderSource) -> None:
    s = minilm_source
    assert (s.family, s.hidden_size, s.dim, s.layers, s.heads) == ("bert", 384, 384, 6, 12)
    assert (s.positions, s.table_positions, s.pad_id, s.first_position, s.tiled) == (512, 512, 0, 0, False)
    assert (s.pooling, s.normalize, s.max_tokens, len(s.sha256)) == ("mean", True, 512, 64)
    assert open_source(ModelSettings(source=MINILM)).max_tokens == 256  # sentence_bert_config.json


def test_torch_and_transformers_stay_unimported_when_source_is_imported() -> None:
    code = "import sys, builders.source; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_package_is_not_executed_when_source_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(tmp_path / "booby_trap" / "inner")
    (tmp_path / "booby_trap" / "__init__.py").write_text("raise RuntimeError('executed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_source(ModelSettings(source="package:booby_trap/inner")).hidden_size == 8
    with pytest.raises(SourceError, match=r"folders in .*booby_trap: inner"):
        open_source(ModelSettings(source="package:booby_trap/innner"))
    with pytest.raises(SourceError, match="no such folder"):
        open_source(ModelSettings(source="package:booby_trap/../other"))


def test_remedy_is_pip_install_when_package_is_missing() -> None:
    with pytest.raises(SourceError, match="pip install no-such-model"):
        open_source(ModelSettings(source="package:no_such_model/x"))


def test_folders_are_listed_when_folder_is_missing(tmp_path: Path) -> None:
    (tmp_path / "minilm").mkdir()
    with pytest.raises(SourceError, match=r"folders in .*: minilm"):
        opened(tmp_path / "minlm")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_refused_with_its_name_when_file_is_missing(tmp_path: Path, name: str) -> None:
    (made_up(tmp_path) / name).unlink()
    with pytest.raises(SourceError, match=rf"{name}.*to do: "):
        opened(tmp_path)


def test_refused_when_weights_are_only_pickled(tmp_path: Path) -> None:
    (made_up(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"no safetensors.*pytorch_model\.bin.*save_pretrained"):
        opened(tmp_path)


def test_refused_when_weights_are_lfs_pointer(tmp_path: Path) -> None:
    (made_up(tmp_path) / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "model_type.*'gpt2'.*supported: bert"),
        ({"auto_map": {"AutoModel": "custom.Model"}}, "custom code.*trust_remote_code"),
        ({"is_decoder": True}, "is_decoder"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_size": None}, "hidden_size.*positive integer"),
    ],
)
def test_refused_with_value_when_config_is_not_served(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        opened(made_up(tmp_path, **config))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({}, "mean"),
    ],
)
@pytest.mark.parametrize("prefix", [OLD, NEW])
def test_pooling_is_read_when_keys_are_old_or_new(
    tmp_path: Path, prefix: str, pooling: dict[str, Any], expected: str
) -> None:
    add_modules(made_up(tmp_path), f"{prefix}Transformer", f"{prefix}Pooling", pooling=pooling)
    assert (opened(tmp_path).pooling, opened(tmp_path).normalize) == (expected, False)


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls.*mean"),
    ],
)
def test_pooling_is_refused_when_not_mean_or_cls(tmp_path: Path, pooling: dict[str, Any], words: str) -> None:
    add_modules(made_up(tmp_path), f"{OLD}Transformer", f"{OLD}Pooling", pooling=pooling)
    with pytest.raises(SourceError, match=f"pooling.*{words}.*mean or cls"):
        opened(tmp_path)


def test_modules_are_refused_when_dense_or_custom(tmp_path: Path) -> None:
    made_up(tmp_path)
    for last in (f"{OLD}Dense", "custom_st.Normalize"):
        add_modules(tmp_path, f"{OLD}Transformer", f"{OLD}Pooling", last, pooling={"pooling_mode": "mean"})
        with pytest.raises(SourceError, match=last):
            opened(tmp_path)


def test_mean_and_not_normalised_when_modules_json_is_missing(tmp_path: Path) -> None:
    source = opened(made_up(tmp_path))
    assert (source.pooling, source.normalize, source.max_tokens) == ("mean", False, 64)


def test_settings_win_when_they_differ_from_modules_json(tmp_path: Path) -> None:
    names = (f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize")
    add_modules(made_up(tmp_path), *names, pooling={"pooling_mode": "mean"})
    assert opened(tmp_path).normalize
    other = opened(tmp_path, pooling="cls", normalize=False)
    assert (other.pooling, other.normalize) == ("cls", False)
    assert other.sha256 != opened(tmp_path).sha256


def test_default_prompt_is_refused_when_set(tmp_path: Path) -> None:
    add_modules(made_up(tmp_path), f"{OLD}Transformer", f"{OLD}Pooling", pooling={"pooling_mode": "mean"})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"q": "query: "}, "default_prompt_name": "q"})
    with pytest.raises(SourceError, match="default prompt: 'q'"):
        opened(tmp_path)


def test_max_tokens_is_own_limit_when_settings_name_none(tmp_path: Path) -> None:
    write(made_up(tmp_path) / "tokenizer_config.json", {"model_max_length": 1e30})
    assert opened(tmp_path).max_tokens == 64
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 48})
    assert opened(tmp_path).max_tokens == 48
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32})
    assert (opened(tmp_path).max_tokens, opened(tmp_path, max_tokens=64).max_tokens) == (32, 64)


def test_both_numbers_are_named_when_max_tokens_is_above_positions(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"65; limit: 64 positions.*lower model\.max_tokens.*tile_positions"):
        opened(made_up(tmp_path), max_tokens=65)


def test_positions_grow_when_tiled(tmp_path: Path) -> None:
    source = opened(made_up(tmp_path), tile_positions=256, max_tokens=200)
    assert (source.positions, source.table_positions, source.tiled, source.max_tokens) == (256, 64, True, 200)
    assert source.sha256 != opened(tmp_path).sha256


@pytest.mark.parametrize("positions", [32, 100])
def test_tiling_is_refused_when_not_whole_multiple(tmp_path: Path, positions: int) -> None:
    with pytest.raises(SourceError, match=f"{positions}; limit: a whole multiple of the table's 64"):
        opened(made_up(tmp_path), tile_positions=positions)


def test_lower_case_is_refused_when_tokenizer_does_not(tmp_path: Path) -> None:
    write(made_up(tmp_path) / "sentence_bert_config.json", {"do_lower_case": True})
    with pytest.raises(SourceError, match="do_lower_case"):
        opened(tmp_path)
    write(tmp_path / "tokenizer.json", {"normalizer": {"type": "Lowercase"}})
    assert opened(tmp_path).max_tokens == 64


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_hash_changes_when_file_changes(tmp_path: Path, name: str) -> None:
    before = opened(made_up(tmp_path)).sha256
    assert opened(tmp_path).sha256 == before
    with (tmp_path / name).open("a") as file:
        file.write(" ")
    assert opened(tmp_path).sha256 != before


def test_tokenizer_has_no_padding_and_truncation_when_written(minilm_source: EncoderSource, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = write_tokenizer(minilm_source, tmp_path / "new")
    written = json.loads(path.read_text(encoding="utf-8"))
    original = json.loads((minilm_source.folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert original["padding"]
    assert original["truncation"]
    assert written == original | {"padding": None, "truncation": None}
    assert len(Tokenizer.from_file(str(path)).encode("word " * 600).ids) == 602


def test_tokenizer_is_refused_when_tokenizers_cannot_read_it(tmp_path: Path) -> None:
    source = opened(made_up(tmp_path / "model"))
    with pytest.raises(SourceError, match="no tokenizer"):
        write_tokenizer(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
