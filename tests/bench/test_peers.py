"""The public servers of comparison: that they read as much of a text as the product does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from builders.bench.driver import BenchError, text_limit
from builders.bench.naive import NaiveDriver
from builders.bench.peers import PeerDriver, infinity, litserve
from builders.settings import load_settings
from builders.source import EncoderSource, open_source
from tests.tools.repositories import ROOT

#: Stands for optimum's export: the last argument is the folder that it writes.
_OPTIMUM = """#!/bin/sh
for last in "$@"; do :; done
mkdir -p "$last"
echo '{"max_position_embeddings": 512, "hidden_size": 384}' > "$last/config.json"
"""


@pytest.fixture(scope="module")
def source() -> EncoderSource:
    return open_source(load_settings(ROOT / "deploy.cpu.yaml").model)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("infinity_emb", "litserve", "python", "optimum-cli"):
        (folder / name).write_text(_OPTIMUM)
        (folder / name).chmod(0o755)
    return folder.parent


def option(driver: NaiveDriver | PeerDriver, name: str) -> str:
    command = driver._child.command
    return command[command.index(name) + 1]


def test_every_server_cuts_texts_where_the_product_does(source: EncoderSource, venv: Path, tmp_path: Path) -> None:
    """MiniLM's own files say 256 to sentence-transformers, the product's settings 512."""
    own = json.loads((source.folder / "sentence_bert_config.json").read_text())
    assert (own["max_seq_length"], text_limit(source)) == (256, 512)
    assert option(NaiveDriver(source), "--max-tokens") == "512"
    assert option(litserve(venv, source, 4), "--max-tokens") == "512"
    torch = infinity(venv, source, "torch", 4, tmp_path)._child._folder
    onnx = infinity(venv, source, "optimum", 4, tmp_path)._child._folder
    assert torch is not None
    assert onnx is not None
    assert json.loads((torch / "sentence_bert_config.json").read_text()) == own | {"max_seq_length": 512}
    assert (torch / "model.safetensors").stat().st_size == (source.folder / "model.safetensors").stat().st_size
    assert json.loads((onnx / "config.json").read_text()) == {"max_position_embeddings": 512, "hidden_size": 384}
    assert (onnx / "1_Pooling" / "config.json").is_file()
    assert json.loads((source.folder / "sentence_bert_config.json").read_text()) == own, "the model is left alone"


def test_limit_is_the_product_s_and_never_above_the_model_s_own_positions(source: EncoderSource) -> None:
    assert text_limit(replace(source, max_tokens=128)) == 128
    assert text_limit(replace(source, max_tokens=2048, positions=2048)) == 512


def test_folder_for_a_peer_is_made_once_and_whole(source: EncoderSource, venv: Path, tmp_path: Path) -> None:
    folder = infinity(venv, source, "optimum", 4, tmp_path)._child._folder
    assert folder is not None
    made = os.stat(folder / "config.json").st_mtime_ns
    assert infinity(venv, source, "optimum", 32, tmp_path)._child._folder == folder
    assert os.stat(folder / "config.json").st_mtime_ns == made
    (venv / "bin" / "optimum-cli").write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    with pytest.raises(BenchError, match=r"optimum could not make the ONNX graph.*no space left"):
        infinity(venv, replace(source, max_tokens=128), "optimum", 4, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["venv", folder.name])


def test_environment_without_the_program_is_refused_with_what_to_do(source: EncoderSource, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"infinity_emb is not in the peers' environment.*docs/measuring.md"):
        infinity(tmp_path, source, "torch", 4, tmp_path)
