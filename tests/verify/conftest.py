"""A random three-layer BERT, exported once, and what a gate needs to judge edits of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir
import pytest
import torch

from builders.export import export_onnx
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from builders.verify.data import token_stream
from builders.verify.gate import FINE_WIDTHS, Gate, GateSettings
from builders.verify.runner import Ids
from tests.verify.graphs import blocks_of, runner

BUCKETS = {16: 8, 48: 4}


@pytest.fixture(scope="session")
def tokenizer_file(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(minilm_source, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenise(tokenizer_file: Path) -> Tokeniser:
    """Cuts at the longest of `BUCKETS`."""
    return Tokeniser(tokenizer_file, 48)


@pytest.fixture(scope="session")
def stream(tokenise: Tokeniser) -> Ids:
    return token_stream(tokenise)


@pytest.fixture(scope="session")
def tiny(minilm_source: EncoderSource, tmp_path_factory: pytest.TempPathFactory) -> onnx_ir.Model:
    """Hidden 64, weights large enough for attention to choose; fresh BERT weights give an even softmax."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=30522,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # All biases of a fresh model are equal zeros and exported as one tensor: an edit would hit them all.
            weight.mul_(5).add_(torch.randn_like(weight) * 0.1) if weight.ndim > 1 else weight.add_(
                torch.randn_like(weight) * 0.1
            )
            assert torch.isfinite(weight).all(), name
    model.save_pretrained(folder)
    shutil.copy(minilm_source.folder / "tokenizer.json", folder)
    report = export_onnx(open_source(ModelSettings(source=str(folder))), folder / "model.onnx")
    return onnx_ir.load(report.path)


@pytest.fixture(scope="session")
def blocks(tiny: onnx_ir.Model) -> dict[str, str]:
    return blocks_of(tiny)


@pytest.fixture(scope="session")
def settings(stream: Ids, tokenise: Tokeniser) -> GateSettings:
    widths = {width: batch for width, batch in FINE_WIDTHS.items() if width <= 48}
    return GateSettings(buckets=BUCKETS, stream=stream, tokenise=tokenise, widths=widths)


@pytest.fixture(scope="session")
def gate(tiny: onnx_ir.Model, blocks: dict[str, str], settings: GateSettings) -> Gate:
    return Gate(runner(tiny, blocks), settings)
