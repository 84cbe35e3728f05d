"""The families whose positions start behind the padding token, from their folder to the graph."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from builders.export import export_onnx
from builders.settings import ModelSettings
from builders.source import EncoderSource, open_source
from tests.fuse.models import LAYERS, LIMIT, answers, assert_equal, feeds, fused, random_encoder


@pytest.mark.parametrize("family", ["mpnet", "roberta"])
def test_vectors_equal_transformers_when_positions_start_behind_pad(
    family: str, tmp_path: Path, minilm_source: EncoderSource
) -> None:
    from transformers import AutoModel

    random_encoder(family).model.save_pretrained(tmp_path)  # type: ignore[operator]
    shutil.copy(minilm_source.folder / "tokenizer.json", tmp_path)
    source = open_source(ModelSettings(source=str(tmp_path)))
    assert (source.first_position, source.positions, source.pad_id) == (2, LIMIT, 1)
    model, report = fused(ir.load(export_onnx(source, tmp_path / "model.onnx").path), family)
    assert (report.layers, source.layers) == (LAYERS, LAYERS)

    # transformers counts positions from the padding token itself, so real tokens must not be it.
    reference = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    batches, expected = feeds(LIMIT), []
    for batch in batches:
        real = np.arange(batch["input_ids"].shape[1])[None] < batch["length"]
        batch["input_ids"] = np.where(real, np.maximum(batch["input_ids"], 2), 1).astype(np.int32)
        with torch.no_grad():
            hidden = reference(
                input_ids=torch.from_numpy(batch["input_ids"]).long(), attention_mask=torch.from_numpy(real).long()
            ).last_hidden_state.numpy()
        expected.append((hidden * real[:, :, None]).sum(1) / batch["length"])
    assert_equal(answers(model, batches), np.concatenate(expected).astype(np.float32))
