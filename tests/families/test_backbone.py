"""The wrapped model in torch: masks, segments, tiling, and what the checks refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders.backbone import Backbone, load_backbone
from builders.errors import SourceError
from builders.families import Architecture, read_architecture
from builders.finite import MASKED, FiniteMasks
from builders.invariance import check_backbone
from tests.families.models import CONFIGS, GENERIC, LIMIT, batches, reference, save_model


def architecture_of(folder: Path) -> Architecture:
    return read_architecture(json.loads((folder / "config.json").read_text()), folder)


def load(folder: Path, auto_class: str = "AutoModel", tile: int | None = None) -> Backbone:
    return load_backbone(folder, architecture_of(folder), auto_class=auto_class, tile=tile)


@pytest.mark.parametrize("family", CONFIGS)
def test_family_passes_the_checks_of_the_generic_row(family: str, tmp_path: Path) -> None:
    check_backbone(load(save_model(family, tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deberta", {"position_biased_input": True, "type_vocab_size": 2}),
        ("deberta-v2", {"conv_kernel_size": 3, "position_biased_input": True, "embedding_size": 24}),
        ("deberta-v2", {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none"}),
        ("distilbert", {"sinusoidal_pos_embds": True}),
        ("modernbert", {"global_attn_every_n_layers": 1}),
        ("modernbert", {"local_attention": 2, "norm_bias": True, "attention_bias": True}),
        ("roberta", {"pad_token_id": 5, "max_position_embeddings": LIMIT + 6}),
    ],
)
def test_family_passes_the_checks_when_its_config_differs(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    backbone = load(save_model(family, tmp_path, **options))
    assert backbone.architecture.positions == LIMIT
    check_backbone(backbone, tmp_path)


@pytest.mark.parametrize(
    ("family", "wide"),
    [
        ("albert", False),
        ("nomic_bert", False),
        ("roformer", False),
        ("gte", False),
        ("mobilebert", True),
        ("xlm", True),
    ],
)
def test_other_encoder_is_taken_in_the_form_that_passes(family: str, wide: bool, tmp_path: Path) -> None:
    backbone = load(save_model(family, tmp_path))
    assert backbone.wide is wide
    for batch in batches(backbone.architecture.pad_id):
        output, real = backbone(*(torch.from_numpy(batch[name]) for name in ("input_ids", "length")))
        for row, expected in enumerate(reference(tmp_path, batch)):
            assert int(real[row].sum()) == len(expected)
            torch.testing.assert_close(output[row, : len(expected)], expected, atol=2e-5, rtol=1e-4)


def test_encoder_is_refused_when_padding_changes_its_answer(tmp_path: Path) -> None:
    # Its convolutions run over the padding, whose position and token type are not zero.
    with pytest.raises(
        SourceError, match=r"not served: a text of 9 tokens changes when it is padded to 24: '0\.\d+ of its"
    ):
        load(save_model("convbert", tmp_path))


def test_model_is_refused_when_a_token_does_not_see_the_next(tmp_path: Path) -> None:
    backbone = load(save_model("bert", tmp_path))
    seen = backbone._additive

    def causal(real: torch.Tensor) -> torch.Tensor:
        mask = seen(real)
        assert isinstance(mask, torch.Tensor)
        return mask + torch.full((real.shape[1], real.shape[1]), MASKED).triu(1)

    backbone._additive = causal  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="differs from its own forward with its own mask"):
        check_backbone(backbone, tmp_path)


def test_window_is_kept_when_only_a_long_text_leaves_it(tmp_path: Path) -> None:
    save_model("modernbert", tmp_path, local_attention=60)
    # As a family without a row: one mask for all layers would open the window, which the short texts do not see.
    architecture = replace(architecture_of(tmp_path), family="other")
    model = load(tmp_path).model
    with pytest.raises(SourceError, match=f"a text of {LIMIT} tokens differs from its own forward"):
        check_backbone(Backbone(model, architecture), tmp_path)
    check_backbone(Backbone(model, architecture, wide=True), tmp_path)


class Counter(torch.nn.Module):
    """A model that sums up what came before: padding does not matter to it, and it is no encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(200, 8)

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.words(input_ids).cumsum(1))


def test_decoder_is_refused_when_its_config_does_not_say_that_it_is_one(tmp_path: Path) -> None:
    architecture = architecture_of(save_model("bert", tmp_path))
    with pytest.raises(SourceError, match="its first token does not see its second: it is no bidirectional encoder"):
        check_backbone(Backbone(Counter(), architecture), tmp_path)


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForSequenceClassification"])
@pytest.mark.parametrize("family", CONFIGS)
def test_empty_row_is_finite(family: str, auto_class: str, tmp_path: Path) -> None:
    backbone = load(save_model(family, tmp_path, auto_class=auto_class), auto_class)
    output, real = backbone(torch.ones(2, 9, dtype=torch.int32), torch.tensor([[0], [9]], dtype=torch.int32))
    assert torch.isfinite(output).all()
    assert real.sum(1).tolist() == [0, 9]


def test_head_that_pools_by_the_mask_sees_the_plain_one(tmp_path: Path) -> None:
    head = "AutoModelForSequenceClassification"
    backbone = load(save_model("modernbert", tmp_path, auto_class=head, classifier_pooling="mean"), head)
    for batch in batches(0):
        output, _ = backbone(*(torch.from_numpy(batch[name]) for name in ("input_ids", "length")))
        torch.testing.assert_close(output, torch.stack(reference(tmp_path, batch, head)), atol=2e-5, rtol=1e-4)
    # The model itself is left as it was: nothing of ours stays on it.
    assert not backbone.model.base_model._forward_pre_hooks  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["bert", "electra", "albert"])
def test_second_segment_runs_from_its_start_to_the_length(family: str, tmp_path: Path) -> None:
    backbone = load(save_model(family, tmp_path))
    for batch in batches(backbone.architecture.pad_id, segments=True):
        inputs = [torch.from_numpy(batch[name]) for name in ("input_ids", "length", "segment_start")]
        output, _ = backbone(*inputs)
        for row, expected in enumerate(reference(tmp_path, batch)):
            torch.testing.assert_close(output[row, : len(expected)], expected, atol=2e-5, rtol=1e-4)
        # A start at the length is no second segment at all.
        torch.testing.assert_close(backbone(inputs[0], inputs[1], inputs[1])[0], backbone(*inputs[:2])[0])
        assert not torch.equal(output, backbone(*inputs[:2])[0])


@pytest.mark.parametrize("family", ["distilbert", "electra", "roberta"])
def test_longer_text_runs_when_the_table_is_tiled(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    short, long = load(tmp_path), load(tmp_path, tile=3 * LIMIT)
    tokens = torch.full((1, 3 * LIMIT), 7, dtype=torch.int32)
    length = torch.tensor([[LIMIT]], dtype=torch.int32)
    torch.testing.assert_close(long(tokens, length)[0][:, :LIMIT], short(tokens[:, :LIMIT], length)[0])
    assert torch.isfinite(long(tokens, 3 * length)[0]).all()


@pytest.mark.parametrize("family", ["deberta-v2", "modernbert"])
def test_tiling_is_refused_when_positions_are_not_learned(family: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no learned position table.*leave model\.tile_positions out"):
        load(save_model(family, tmp_path), tile=2 * LIMIT)


def test_weights_are_refused_when_the_head_is_missing(tmp_path: Path) -> None:
    save_model("bert", tmp_path)
    with pytest.raises(SourceError, match=r"the weights lack tensors.*classifier"):
        load(tmp_path, "AutoModelForTokenClassification")
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "layer.1.output" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"the weights lack tensors.*layer\.1\.output"):
        load(tmp_path)
    path.write_bytes(b"no weights")
    with pytest.raises(SourceError, match="the weights cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores, hidden: scores.masked_fill(hidden, torch.finfo(scores.dtype).min),
        lambda scores, hidden: torch.where(hidden, float("-inf"), scores),
        lambda scores, hidden: scores + hidden * torch.finfo(scores.dtype).min,
        lambda scores, hidden: scores + torch.zeros(3).masked_fill_(hidden, torch.tensor(-3e38)),
    ],
)
def test_mask_is_finite_however_a_model_makes_it(
    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    hidden = torch.tensor([False, True, False])
    with FiniteMasks():
        assert mask(torch.zeros(3), hidden).tolist() == [0.0, MASKED, 0.0]
        # A bound stays one, and so does every other number.
        assert torch.full((1,), -2e4).clamp(min=float("-inf")).item() == -2e4
    assert mask(torch.zeros(3), hidden)[1] < -1e38


def test_generic_models_of_the_tests_are_no_families() -> None:
    assert not set(GENERIC) & set(CONFIGS)
