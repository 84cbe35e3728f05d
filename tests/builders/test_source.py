from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from builders.errors import SourceError
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from tests.conftest import MINILM

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 6,
    "pad_token_id": 0,
}
OLD = "sentence_transformers.models."


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
    assert (s.family, s.architecture.hidden_size, s.size, s.layers, s.heads) == ("bert", 384, 384, 6, 12)
    assert (s.positions, s.architecture.table_positions, s.pad_id, s.tiled) == (512, 512, 0, False)
    assert (s.task.name, s.task.pooling, s.task.normalize, s.max_tokens) == ("embedding", ("mean",), True, 512)
    assert (s.transformer, s.lower_case, len(s.sha256)) == (s.folder, False, 64)
    assert open_source(ModelSettings(source=MINILM)).max_tokens == 256  # sentence_bert_config.json


def test_torch_and_transformers_stay_unimported_when_source_is_imported() -> None:
    code = "import sys, builders.source; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_package_is_not_executed_when_source_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(tmp_path / "booby_trap" / "inner")
    (tmp_path / "booby_trap" / "__init__.py").write_text("raise RuntimeError('executed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_source(ModelSettings(source="package:booby_trap/inner")).size == 8
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
        ({"model_type": "gpt2"}, "decoder.*'gpt2'.*bidirectional encoders: bert"),
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


def test_mean_and_not_normalised_when_modules_json_is_missing(tmp_path: Path) -> None:
    source = opened(made_up(tmp_path))
    assert (source.task.pooling, source.task.normalize, source.max_tokens) == (("mean",), False, 64)


def test_settings_win_when_they_differ_from_modules_json(tmp_path: Path) -> None:
    names = (f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize")
    add_modules(made_up(tmp_path), *names, pooling={"pooling_mode": "mean"})
    assert opened(tmp_path).task.normalize
    other = opened(tmp_path, pooling="cls", normalize=False)
    assert (other.task.pooling, other.task.steps) == (("cls",), ())
    assert other.sha256 != opened(tmp_path).sha256


def test_max_tokens_is_own_limit_when_settings_name_none(tmp_path: Path) -> None:
    write(made_up(tmp_path) / "tokenizer_config.json", {"model_max_length": 1e30})
    assert opened(tmp_path).max_tokens == 64
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 48})
    assert opened(tmp_path).max_tokens == 48
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32})
    assert (opened(tmp_path).max_tokens, opened(tmp_path, max_tokens=64).max_tokens) == (32, 64)
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 66})
    assert opened(tmp_path).max_tokens == 64


def test_both_numbers_are_named_when_max_tokens_is_above_positions(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"65; limit: 64 positions.*lower model\.max_tokens.*tile_positions"):
        opened(made_up(tmp_path), max_tokens=65)


def test_positions_grow_when_tiled(tmp_path: Path) -> None:
    source = opened(made_up(tmp_path), tile_positions=256, max_tokens=200)
    assert (source.positions, source.architecture.positions) == (256, 64)
    assert (source.tiled, source.max_tokens) == (True, 200)
    assert source.sha256 != opened(tmp_path).sha256


@pytest.mark.parametrize("positions", [32, 100])
def test_tiling_is_refused_when_not_whole_multiple(tmp_path: Path, positions: int) -> None:
    with pytest.raises(SourceError, match=f"{positions}; limit: a whole multiple of the table's 64"):
        opened(made_up(tmp_path), tile_positions=positions)


def test_tokenizer_lower_cases_when_the_folder_asks_for_it(tmp_path: Path) -> None:
    write(made_up(tmp_path / "model") / "sentence_bert_config.json", {"do_lower_case": True})
    before = opened(tmp_path / "model")
    words = {"type": "WordLevel", "vocab": {"moon": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    lower, strip = {"type": "Lowercase"}, {"type": "Strip", "strip_left": True, "strip_right": True}
    for own, written in (
        (None, {"type": "Sequence", "normalizers": [lower]}),
        (strip, {"type": "Sequence", "normalizers": [lower, strip]}),
        ({"type": "Sequence", "normalizers": [strip]}, {"type": "Sequence", "normalizers": [lower, strip]}),
        (lower, lower),
    ):
        write(tmp_path / "model" / "tokenizer.json", {"model": words, "normalizer": own})
        source = opened(tmp_path / "model")
        path = write_tokenizer(source, tmp_path / "out")
        assert json.loads(path.read_text(encoding="utf-8"))["normalizer"] == written
        assert Tokenizer.from_file(str(path)).encode("MOON").ids == [0]
    write(tmp_path / "model" / "sentence_bert_config.json", {})
    assert (before.lower_case, opened(tmp_path / "model").lower_case) == (True, False)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("vocab.txt",), r"only vocab\.txt.*to do: python -c .*AutoTokenizer.*save_pretrained.* writes it"),
        (("vocab.json", "merges.txt"), r"only vocab\.json and merges\.txt.*to do: python -c"),
        (("spiece.model",), r"only spiece\.model.*to do: pip install sentencepiece protobuf, then python -c"),
        (("merges.txt",), r"nor files to make one of.*limit: tokenizer\.json, or one of .*vocab\.json \+ merges\.txt"),
    ],
)
def test_command_that_makes_the_tokenizer_named_when_its_files_are_there(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    (made_up(tmp_path) / "tokenizer.json").unlink()
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(SourceError, match=words):
        opened(tmp_path)


def test_command_of_the_refusal_writes_the_tokenizer(tmp_path: Path) -> None:
    (made_up(tmp_path) / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "moon"]))
    with pytest.raises(SourceError) as refused:
        opened(tmp_path)
    code = str(refused.value.remedy).split('"')[1]
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert Tokenizer.from_file(str(write_tokenizer(opened(tmp_path), tmp_path / "out"))).encode("moon").ids == [2, 5, 3]


def test_template_of_pairs_survives_in_the_written_tokenizer(minilm_source: EncoderSource, tmp_path: Path) -> None:
    served = Tokenizer.from_file(str(write_tokenizer(minilm_source, tmp_path)))
    original = Tokenizer.from_file(str(minilm_source.folder / "tokenizer.json"))
    original.no_padding()
    original.no_truncation()
    one, other = (each.encode("how far", "is the moon") for each in (served, original))
    assert (one.ids, one.type_ids) == (other.ids, other.type_ids)
    assert sum(one.type_ids) == 4


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_hash_changes_when_file_changes(tmp_path: Path, name: str) -> None:
    before = opened(made_up(tmp_path)).sha256
    assert opened(tmp_path).sha256 == before
    with (tmp_path / name).open("a") as file:
        file.write(" ")
    assert opened(tmp_path).sha256 != before


def test_tokenizer_has_no_padding_and_truncation_when_written(minilm_source: EncoderSource, tmp_path: Path) -> None:
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
