"""Bucket edges against every possible choice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.bench.driver import BenchError
from builders.tune.buckets import best_edges, padded_tokens


def by_trying_all(lengths: list[int], count: int, longest: int, step: int) -> int:
    possible = range(step, longest, step)
    return min(
        padded_tokens(lengths, [*edges, longest])
        for number in range(min(count, len(possible) + 1))
        for edges in combinations(possible, number)
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([(64, 8), (60, 8), (12, 1), (64, 16), (7, 8)]),
)
def test_no_other_choice_pads_less(lengths: list[int], count: int, size: tuple[int, int]) -> None:
    longest, step = size
    found = best_edges(lengths, count, longest, step)
    assert found.padded == padded_tokens(lengths, found.edges) == by_trying_all(lengths, count, longest, step)
    assert len(found.edges) <= count
    assert found.edges[-1] == longest
    assert list(found.edges) == sorted(set(found.edges))
    assert all(edge % step == 0 for edge in found.edges[:-1])
    assert found.tokens == sum(min(length, longest) for length in lengths)


def test_more_buckets_never_pad_more_and_enough_pad_only_up_to_the_step() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 500).tolist()
    padded = [best_edges(lengths, count, 512).padded for count in range(1, 9)]
    assert padded == sorted(padded, reverse=True)
    assert padded[0] == 512 * 500
    assert best_edges(lengths, 64, 512).padded == sum(-(-length // 8) * 8 for length in lengths)


def test_clusters_get_an_edge_each_and_the_longest_text_keeps_its_bucket() -> None:
    found = best_edges([20] * 60 + [100] * 20 + [220] * 15, 4, 512)
    assert found.edges == (24, 104, 224, 512)
    assert found.text() == "24, 104, 224, 512 (6 % padding)"


def test_thousands_of_lengths_are_no_matter() -> None:
    lengths = np.random.default_rng(1).integers(1, 16_384, 20_000).tolist()
    assert len(best_edges(lengths, 8, 16_384).edges) == 8


@pytest.mark.parametrize(("lengths", "count", "longest"), [([], 3, 512), ([5], 0, 512), ([5], 3, 0)])
def test_what_cannot_be_chosen_is_refused(lengths: list[int], count: int, longest: int) -> None:
    with pytest.raises(BenchError, match="bucket edges"):
        best_edges(lengths, count, longest)
