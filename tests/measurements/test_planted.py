"""What the measurement of planted slow-downs calls a surprise; the measurement itself takes half an hour."""

from __future__ import annotations

import pytest

from tests.measurements.planted import PAIRED, surprise


@pytest.mark.parametrize(
    ("share", "slower", "said"),
    [
        (0.0, False, None),
        (0.0, True, "the same build was called slower"),
        (0.1, True, None),
        (0.1, False, "a slow-down of 10 % was not found"),
        (0.05, False, None),
        (0.05, True, None),
    ],
)
def test_only_what_should_not_come_out_is_a_surprise(share: float, slower: bool, said: str | None) -> None:
    assert surprise(share, PAIRED, slower) == said
