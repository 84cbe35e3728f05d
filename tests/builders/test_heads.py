"""The end of the graph on numbers that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from builders.errors import SourceError
from builders.heads import DenseStep, LogitsHead, NormalizeStep, make_head, pool
from builders.tasks import Dense, PoolingMode, TaskFacts

# Two texts of 3 and 1 tokens; what stands in the padding is larger than all of it.
HIDDEN = torch.tensor([[[1.0, -4], [2, -5], [6, -9]], [[3, -2], [99, 99], [99, 99]]])
LENGTH = torch.tensor([[3], [1]], dtype=torch.int32)
REAL = torch.arange(3)[None] < LENGTH


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [[3, -6], [3, -2]]),
        ("cls", [[1, -4], [3, -2]]),
        ("max", [[6, -4], [3, -2]]),
        ("last", [[6, -9], [3, -2]]),
        ("weighted", [[23 / 6, -41 / 6], [3, -2]]),
        ("mean_sqrt", [[9 / 3**0.5, -18 / 3**0.5], [3, -2]]),
    ],
)
def test_padding_does_not_count_when_pooled_by(mode: PoolingMode, expected: list[list[float]]) -> None:
    for dtype in (torch.float32, torch.float16):
        got = pool(mode, HIDDEN.to(dtype), REAL, LENGTH)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "last", "weighted", "mean_sqrt"])
def test_vector_is_finite_when_a_row_is_empty(mode: PoolingMode) -> None:
    empty = torch.zeros(2, 1, dtype=torch.int32)
    vector = pool(mode, HIDDEN, torch.zeros(2, 3, dtype=torch.bool), empty)
    assert torch.isfinite(NormalizeStep()(vector)).all()


def test_sum_of_a_long_half_precision_text_does_not_overflow() -> None:
    hidden = torch.full((1, 2048, 4), 100.0, dtype=torch.float16)
    length = torch.tensor([[2048]], dtype=torch.int32)
    assert pool("mean", hidden, torch.ones(1, 2048, dtype=torch.bool), length).tolist() == [[100.0] * 4]


@pytest.mark.parametrize(
    ("activation", "expected"), [("softmax", [0.25, 0.75]), ("sigmoid", [0.5, 0.75]), ("none", [0.0, 1.0986123])]
)
def test_scores_are_those_of_the_activation(activation: str, expected: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0986123]])
    head = LogitsHead(activation)  # type: ignore[arg-type]
    torch.testing.assert_close(head(logits, REAL, LENGTH), torch.tensor([expected]))
    # The last axis is that of the labels, for tokens too.
    torch.testing.assert_close(head(logits[None].half(), REAL, LENGTH), torch.tensor([[expected]]), atol=1e-3, rtol=0)


def test_dense_is_refused_when_weights_do_not_fit() -> None:
    facts = Dense("2_Dense", inputs=2, outputs=3, bias=True, activation="Identity", residual=False)
    weights = {"linear.weight": torch.ones(3, 2), "linear.bias": torch.zeros(3)}
    assert DenseStep(facts, weights)(torch.tensor([[1.0, 2.0]])).tolist() == [[3.0, 3.0, 3.0]]
    for wrong in ({"linear.weight": torch.ones(3, 2)}, weights | {"more": torch.ones(1)},
                  weights | {"linear.weight": torch.ones(2, 3)}):  # fmt: skip
        with pytest.raises(SourceError, match=r"do not fit its config.*2_Dense"):
            DenseStep(facts, wrong)


def test_dense_is_refused_when_its_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.safetensors").write_bytes(b"weights")
    dense = Dense("x", inputs=2, outputs=2, bias=False, activation="Tanh", residual=False)
    with pytest.raises(SourceError, match=r"cannot be read.*x/model\.safetensors"):
        make_head(TaskFacts("embedding", 2, pooling=("mean",), steps=(dense,)), tmp_path)
