"""Which tokens are kept: a contiguous part, cut exactly, windows without gaps and with the overlap asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from builders.serving.entry.cutting import Cut, common_start, own_tokens, window_count, window_cuts


@given(total=st.integers(1, 300), room=st.integers(1, 40), overlap=st.integers(0, 39))
def test_windows_cover_every_token_with_exactly_the_overlap(total: int, room: int, overlap: int) -> None:
    assume(overlap < room)
    cuts = window_cuts(total, room, overlap)
    assert len(cuts) == window_count(total, room, overlap)
    assert cuts[0].start == 0
    assert cuts[-1].stop == total
    assert all(0 < cut.stop - cut.start <= room for cut in cuts)
    for one, next_one in pairwise(cuts):
        assert one.stop - one.start == room
        assert one.stop - next_one.start == overlap
        assert next_one.stop > one.stop, "a window holds nothing new"


@pytest.mark.parametrize(
    ("total", "room", "overlap", "cuts"),
    [
        (1, 4, 1, [(0, 1)]),
        (4, 4, 1, [(0, 4)]),
        (5, 4, 1, [(0, 4), (3, 5)]),
        (7, 4, 1, [(0, 4), (3, 7)]),
        (8, 4, 1, [(0, 4), (3, 7), (6, 8)]),
        (8, 4, 0, [(0, 4), (4, 8)]),
        (6, 4, 3, [(0, 4), (1, 5), (2, 6)]),
    ],
)
def test_windows_around_the_edges(total: int, room: int, overlap: int, cuts: list[tuple[int, int]]) -> None:
    assert window_cuts(total, room, overlap) == cuts


@pytest.mark.parametrize(
    ("ids", "which", "place"),
    [
        ([None, 0, 0, None], 0, (1, 3)),
        ([0, 0, 0], 0, (0, 3)),
        ([None, 0, None, None, 1, 1, None], 1, (4, 6)),
        ([0, 1], 1, (1, 2)),
        ([None, None], 0, (2, 2)),
        ([None, 0, None, None], 1, (4, 4)),
        ([], 0, (0, 0)),
    ],
)
def test_own_tokens_found_whatever_stands_around_them(
    ids: list[int | None], which: int, place: tuple[int, int]
) -> None:
    assert own_tokens(ids, which) == Cut(*place)


@pytest.mark.parametrize(
    ("one", "other", "shared"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 3], 1), ([2], [1], 0)]
)
def test_common_start_counted(one: list[int], other: list[int], shared: int) -> None:
    assert common_start(one, other) == common_start(other, one) == shared
