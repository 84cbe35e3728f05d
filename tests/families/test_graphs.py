"""Every family from its folder to the fused graph, against transformers' own answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import ShapeInferencePass

from builders.errors import ExportError
from builders.fuse import expected_sites
from builders.int8 import Row, quantize_static
from builders.precision import convert
from builders.rounding import round_fp16_casts
from tests.families.conftest import Made
from tests.families.models import CONFIGS, LAYERS, LIMIT, WORDS, Batch, Floats, assert_close, batches, reference

MadeOf = Callable[..., Made]
# camembert and xlm-roberta are RoBERTa by another name, ELECTRA is BERT with narrow embeddings; BERT and MPNet are what
# other fast tests use (tests/builders, tests/fuse), and DeBERTa's first version takes three times as long as any other.
SLOW = ("bert", "camembert", "deberta", "electra", "mpnet", "xlm-roberta")
FAMILIES = [pytest.param(family, marks=pytest.mark.slow if family in SLOW else []) for family in CONFIGS]
HEADS = {
    "AutoModelForSequenceClassification": "SCORES",
    "AutoModelForTokenClassification": "TAGS",
    "AutoModelForQuestionAnswering": "SPANS",
}
SITES = {
    "post-norm": {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 1},
    "mpnet": {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 2},
    "deberta": {"qkv": 0, "attention": 0, "scale_mask": 0, "gelu": 2, "layer_norm": 5, "positions": 0},
    "deberta-v2": {"qkv": 0, "attention": 0, "scale_mask": 0, "gelu": 2, "layer_norm": 5, "positions": 0},
    "modernbert": {"qkv": 0, "attention": 0, "scale_mask": 0, "gelu": 2, "layer_norm": 5, "positions": 4},
}


def session_of(model: ir.Model, *, optimise: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def pooled(rows: list[torch.Tensor]) -> Floats:
    """The mean of each text's token vectors."""
    means: Floats = torch.stack([row.mean(0) for row in rows]).numpy()
    return means


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_fused_as_its_table_says(made_of: MadeOf, family: str) -> None:
    made = made_of(family)
    wanted = SITES.get(family, SITES["post-norm"])
    assert made.report.found == wanted | {"attention_operator": 0}
    expected = expected_sites(family, LAYERS, made.source.architecture.traits)
    assert {kind: expected[kind] for kind in wanted} == wanted
    assert "Range" not in made.report.operators_after
    assert "Cos" not in made.report.operators_after
    names = [block.name for block in made.report.blocks]
    assert names[0] == "embeddings.norm"
    assert names[-2:] == [f"layer.{LAYERS - 1}.output.norm", "pooled"]


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_equal_transformers_at_every_length(made_of: MadeOf, family: str) -> None:
    made = made_of(family)
    session = session_of(made.fused)
    for batch in batches(made.source.pad_id):
        (together,) = session.run(None, batch)
        assert_close(together, pooled(reference(made.folder, batch)))
        # Padding is exact: the text alone, and beside other tokens where its padding was.
        for row, length in enumerate(batch["length"][:, 0]):
            (alone,) = session.run(None, _row(batch, row, length))
            assert_close(alone, together[row : row + 1], error=2e-6)
        other = batch | {"input_ids": _scribbled(batch)}
        np.testing.assert_array_equal(session.run(None, other)[0], together)


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_is_finite_when_the_graph_is_narrow(made_of: MadeOf, family: str) -> None:
    """CASES 3: the longest text beside one of a single token and one of none."""
    made = made_of(family)
    for model in (made.graph, made.fused):
        numbers = [value.const_value.numpy() for value in model.graph.initializers.values() if value.const_value]
        lowest = min(float(array.min()) for array in numbers if array.dtype.kind == "f" and array.size)
        assert lowest == -1e4
    narrow = made.fused.clone()
    ShapeInferencePass()(narrow)
    assert convert(narrow, "fp16").clamped == ()
    tokens = np.random.default_rng(1).integers(6, WORDS, (3, LIMIT)).astype(np.int32)
    batch = {"input_ids": tokens, "length": np.array([[1], [LIMIT], [0]], dtype=np.int32)}
    (got,) = session_of(round_fp16_casts(narrow), optimise=False).run(None, batch)
    (expected,) = session_of(made.fused).run(None, batch)
    assert np.isfinite(got).all()
    assert np.isfinite(expected).all()
    cosines = (got * expected).sum(-1)[:2] / np.linalg.norm(got[:2], axis=-1) / np.linalg.norm(expected[:2], axis=-1)
    assert cosines.min() > 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_every_layer_in_int8(made_of: MadeOf, family: str) -> None:
    narrow = made_of(family).fused.clone()
    ShapeInferencePass()(narrow)
    random = np.random.default_rng(1)
    rows = [Row(random.integers(6, WORDS, n).astype(np.int32), n) for n in (2, 9, 30, LIMIT)]
    products = quantize_static(narrow, rows)
    # QKV in one, attention's output and the two of the feed-forward block; DeBERTa's Q, K and V are three.
    wanted = LAYERS * (6 if "deberta" in family else 4)
    # ELECTRA's embeddings are narrower than its blocks.
    assert len(products) == wanted + (family == "electra")
    assert all(product.int8 for product in products)
    session, batch = session_of(narrow), batches(made_of(family).source.pad_id)[-1]
    (together,) = session.run(None, batch)
    (exact,) = session_of(made_of(family).fused).run(None, batch)
    alone = np.concatenate([session.run(None, _row(batch, *place))[0] for place in enumerate(batch["length"][:, 0])])
    for other, least in ((exact, 0.99), (alone, 0.9999)):
        norms = np.linalg.norm(together, axis=-1) * np.linalg.norm(other, axis=-1)
        assert ((together * other).sum(-1) / norms).min() > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "changed"),
    [
        # As DeBERTa-v2 xlarge: a convolution with its norm beside the first layer, and a learned table.
        ("deberta-v2", {"conv_kernel_size": 3, "position_biased_input": True}, {"layer_norm": 6, "positions": 1}),
        ("deberta-v2", {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none"}, {}),
        ("modernbert", {"global_attn_every_n_layers": 1}, {"positions": 2}),
        ("bert", {"hidden_act": "relu"}, {"gelu": 0}),
        ("bert", {"hidden_act": "gelu_fast"}, {}),
    ],
)
def test_table_follows_the_config(
    made_of: MadeOf, family: str, options: dict[str, Any], changed: dict[str, int]
) -> None:
    made = made_of(family, **options)
    assert made.report.found == SITES.get(family, SITES["post-norm"]) | changed | {"attention_operator": 0}
    session = session_of(made.fused)
    for batch in batches(made.source.pad_id):
        assert_close(session.run(None, batch)[0], pooled(reference(made.folder, batch)))


def _head_cases() -> list[Any]:
    fast = {("deberta-v2", "AutoModelForSequenceClassification"), ("modernbert", "AutoModelForTokenClassification")}
    fast |= {("bert", "AutoModelForQuestionAnswering")}
    return [
        pytest.param(family, head, marks=[] if (family, head) in fast else pytest.mark.slow)
        for family in CONFIGS
        for head in HEADS
    ]


@pytest.mark.parametrize(("family", "head"), _head_cases())
def test_scores_equal_transformers_when_the_model_has_a_head(made_of: MadeOf, family: str, head: str) -> None:
    made = made_of(family, head)
    session = session_of(made.fused)
    assert [output.name for output in session.get_outputs()] == [HEADS[head]]
    segments = "segment_start" in [value.name for value in session.get_inputs()]
    # DeBERTa-v3, DistilBERT, MPNet, ModernBERT and RoBERTa have no second token type; taggers take no pairs.
    takes_types = family in ("bert", "electra") and head != "AutoModelForTokenClassification"
    assert segments is takes_types
    for batch in batches(made.source.pad_id, segments=segments):
        (got,) = session.run(None, batch)
        for row, expected in enumerate(reference(made.folder, batch, head)):
            if head != "AutoModelForQuestionAnswering":
                expected = expected.softmax(-1)
            mine = got[row, : batch["length"][row, 0]] if made.source.task.per_token else got[row][None]
            assert_close(mine, np.atleast_2d(expected.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("albert", {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 1}),
        ("big_bird", {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 1}),
        ("megatron-bert", {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 1}),
        ("rembert", {"qkv": 2, "attention": 2, "scale_mask": 2, "gelu": 2, "layer_norm": 5, "positions": 1}),
        # Rotary: the scores are no product of projections, and the feed-forward's gate is no GELU.
        ("nomic_bert", {"qkv": 0, "attention": 0, "scale_mask": 0, "gelu": 0, "layer_norm": 5}),
        ("roformer", {"qkv": 0, "attention": 0, "scale_mask": 0, "gelu": 2, "layer_norm": 5}),
        # No LayerNorm at all, and projections of another width than the input's.
        ("mobilebert", {"attention": 2, "gelu": 0, "layer_norm": 0}),
    ],
)
def test_other_encoder_is_fused_as_found_and_answers_as_transformers(
    made_of: MadeOf, family: str, found: dict[str, int]
) -> None:
    made = made_of(family)
    assert made.report.expected == {}
    assert {kind: made.report.found[kind] for kind in found} == found
    session = session_of(made.fused)
    for batch in batches(made.source.pad_id):
        (together,) = session.run(None, batch)
        assert_close(together, pooled(reference(made.folder, batch)), error=2e-4)
        np.testing.assert_array_equal(session.run(None, batch | {"input_ids": _scribbled(batch)})[0], together)


@pytest.mark.slow
def test_other_encoder_is_refused_when_it_cannot_be_exported(made_of: MadeOf) -> None:
    with pytest.raises(ExportError, match=r"torch\.onnx cannot export the model"):
        made_of("longformer")


def _row(batch: Batch, row: int, length: int) -> Batch:
    return {name: array[row : row + 1, :length] for name, array in batch.items()}


def _scribbled(batch: Batch) -> Any:
    tokens = batch["input_ids"]
    return np.where(np.arange(tokens.shape[1])[None] < batch["length"], tokens, 7).astype(np.int32)
