"""Vectors of windows and of smaller sizes, compared with the formula written out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from builders.serving.entry.tasks import Embedding, answer_tensors
from tests.serving.tasks.parts import answered, text, window

SIZE = 6


def vectors(count: int, seed: int = 0, *, normalize: bool = True) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).normal(size=(count, SIZE)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize else rows


def test_rows_given_as_the_lanes_made_them_when_nothing_was_cut() -> None:
    rows = vectors(3)
    got = Embedding(size=SIZE, normalize=True)(answered([text(window(0, own)) for own in (5, 0, 9)], list(rows)))
    assert got.dtype == np.float32
    assert (got == rows).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_windows_averaged_by_their_own_tokens(normalize: bool) -> None:
    rows = vectors(5, normalize=normalize)
    long = text(window(0, 10), window(8, 10), window(16, 3))
    got = Embedding(size=SIZE, normalize=normalize)(
        answered([text(window(0, 4)), long, text(window(0, 7))], list(rows))
    )
    mean = sum(rows[1 + place].astype(np.float64) * own for place, own in enumerate((10, 10, 3))) / 23
    expected = mean / np.sqrt((mean**2).sum()) if normalize else mean
    assert np.allclose(got[1], expected, atol=1e-6)
    assert (got[[0, 2]] == rows[[0, 4]]).all(), "a text of one piece keeps its row"


@pytest.mark.parametrize("normalize", [True, False])
def test_dimensions_cut_the_vector_and_scale_it_again(normalize: bool) -> None:
    rows = vectors(3, normalize=normalize)
    long = text(window(0, 10), window(10, 5))
    got = Embedding(size=SIZE, normalize=normalize)(answered([text(window(0, 4)), long], list(rows), dimensions=4))
    assert got.shape == (2, 4)
    assert got.flags.c_contiguous, "Triton hands the memory on as it is"
    mean = (rows[1].astype(np.float64) * 10 + rows[2] * 5) / 15
    for own, whole in zip(got, (rows[0].astype(np.float64), mean), strict=True):
        part = whole[:4]
        assert np.allclose(own, part / np.linalg.norm(part) if normalize else part, atol=1e-6)


def test_vector_of_zeros_stays_finite_when_it_is_scaled() -> None:
    got = Embedding(size=SIZE, normalize=True)(answered([text(window(0, 2))], [np.zeros(SIZE)], dimensions=2))
    assert got.tolist() == [[0, 0]]


def test_tokens_and_cut_are_counted_over_the_windows() -> None:
    texts = [text(window(0, 4), cut=9), text(window(0, 10), window(8, 5))]
    tensors = answer_tensors(Embedding(size=SIZE, normalize=True), answered(texts, list(vectors(3))))
    assert list(tensors) == ["EMBEDDING", "TOKENS", "CUT"]
    assert tensors["TOKENS"].tolist() == [[6], [12 + 7]]
    assert tensors["CUT"].tolist() == [[9], [0]]
    assert {tensors["TOKENS"].dtype, tensors["CUT"].dtype} == {np.dtype(np.int32)}
