"""Which of a text's own tokens a row of a bucket model gets: the end cut, the start cut, or windows.

Places are counted in own tokens: those of the text itself, or of the second text of a pair; special tokens, the first
text of a pair and a prompt stay around them and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """Own tokens `start` up to and without `stop`."""

    start: int
    stop: int


def window_count(total: int, room: int, overlap: int) -> int:
    """How many windows of `room` tokens, each but the first beginning with `overlap` of the one before, hold `total`.

    Args:
        total: tokens, more than none.
        room: tokens a window has room for, more than `overlap`.
        overlap: tokens that two neighbours share.
    """
    return 1 if total <= room else 1 + -(-(total - room) // (room - overlap))


def window_cuts(total: int, room: int, overlap: int) -> list[Cut]:
    """The windows themselves, in order; the last one may be shorter. Arguments as for `window_count`."""
    step = room - overlap
    return [
        Cut(number * step, min(total, number * step + room)) for number in range(window_count(total, room, overlap))
    ]


def own_tokens(sequence_ids: Sequence[int | None], which: int) -> Cut:
    """Places in a whole encoding of the tokens of text `which` (0, or 1 for the second of a pair), side by side.

    Read from the encoding and not from the tokeniser's template, so that it does not matter which special tokens stand
    where. A text without tokens is an empty place at the end.
    """
    if which not in sequence_ids:
        return Cut(len(sequence_ids), len(sequence_ids))
    backwards = sequence_ids[::-1]
    return Cut(sequence_ids.index(which), len(sequence_ids) - backwards.index(which))


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts share from their beginning."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
