"""Scores of windows: averaged for classification, the best one for reranking."""

from __future__ import annotations

import numpy as np
import pytest

from builders.serving.entry.tasks import BestScores, MeanScores
from tests.serving.tasks.parts import answered, text, window

TEXTS = [text(window(0, 4)), text(window(0, 10), window(8, 10), window(16, 2)), text(window(0, 0))]


def test_windows_averaged_by_their_own_tokens_for_classification() -> None:
    chance = np.random.default_rng(1)
    rows = chance.dirichlet(np.ones(5), size=5).astype(np.float32)
    got = MeanScores(size=5)(answered(TEXTS, list(rows)))
    assert got.dtype == np.float32
    assert (got[[0, 2]] == rows[[0, 4]]).all()
    expected = (rows[1].astype(np.float64) * 10 + rows[2] * 10 + rows[3] * 2) / 22
    assert np.allclose(got[1], expected, atol=1e-7)
    assert np.isclose(got[1].sum(), 1), "still a distribution"


@pytest.mark.parametrize("best", [0, 1, 2])
def test_best_window_speaks_for_its_document(best: int) -> None:
    rows = [[0.5], [0.1], [0.2], [0.3], [0.4]]
    rows[1 + best] = [0.9]
    got = BestScores(size=1)(answered(TEXTS, [np.array(row) for row in rows]))
    assert np.allclose(got, [[0.5], [0.9], [0.4]])


def test_whole_row_of_the_best_window_given_when_there_are_several_labels() -> None:
    rows = [np.array(row) for row in ([0.5, 0.5], [0.9, 0.1], [0.3, 0.7], [0.4, 0.6], [0.2, 0.8])]
    got = BestScores(size=2)(answered(TEXTS, rows))
    assert np.allclose(got, [[0.5, 0.5], [0.3, 0.7], [0.2, 0.8]])


def test_negative_scores_compared_too() -> None:
    got = BestScores(size=1)(answered(TEXTS, [np.array([score]) for score in (-1, -9, -3, -5, -2)]))
    assert got.tolist() == [[-1], [-3], [-2]]
