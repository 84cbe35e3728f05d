"""Bucket edges that pad a sample of texts least. Exact, by dynamic programming. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from builders.bench.driver import BenchError

#: Edges are multiples of this: the tensor cores' own unit, and a graph per length to the token would fit noise.
STEP = 8


@dataclass(frozen=True)
class Edges:
    """Buckets for a sample.

    Attributes:
        edges: lengths in tokens, rising; the last one is the longest text's.
        padded: tokens that the sample is computed with, all texts together.
        tokens: tokens it has.
    """

    edges: tuple[int, ...]
    padded: int
    tokens: int

    @property
    def waste(self) -> float:
        """Share of the computed tokens that is padding, of 1."""
        return 1 - self.tokens / self.padded

    def text(self) -> str:
        """For people: `32, 128, 512 (12 % padding)`."""
        return f"{', '.join(str(edge) for edge in self.edges)} ({100 * self.waste:.0f} % padding)"


def padded_tokens(lengths: Sequence[int], edges: Sequence[int]) -> int:
    """Tokens of a sample when each text is padded to the first edge that holds it; longer ones are cut at the last.

    Args:
        lengths: tokens of each text.
        edges: rising, at least one.
    """
    rising = np.asarray(edges, np.int64)
    places = np.minimum(np.searchsorted(rising, np.asarray(lengths, np.int64)), len(rising) - 1)
    return int(rising[places].sum())


def best_edges(lengths: Sequence[int], count: int, longest: int, step: int = STEP) -> Edges:
    """The edges with the fewest padded tokens among all choices of multiples of `step` and `longest`.

    With p(n, j) = fewest padded tokens of all texts up to candidate edge j in n buckets, the last of which is j:
    p(n, j) = min over i < j of p(n - 1, i) + (texts between i and j) * edge j. Fewer buckets are returned when more
    would change nothing. Takes count * m² steps for m candidates; only lengths that occur are candidates.

    Args:
        lengths: tokens of each text of the sample, special tokens included; longer ones count as `longest`.
        count: buckets, the last one included.
        longest: longest text that is not cut, tokens; always the last edge.
        step: edges are multiples of it.

    Raises:
        BenchError: the sample is empty, or `count`, `longest` or `step` is below 1.
    """
    if not len(lengths) or min(count, longest, step) < 1:
        raise BenchError(
            "bucket edges cannot be chosen",
            value=f"{len(lengths)} texts, {count} buckets, longest {longest}, step {step}",
            limit="a text, and each at least 1",
        )
    cut = np.clip(np.asarray(lengths, np.int64), 1, longest)
    # Only an edge at a text's own length, rounded up, can be best: a longer one pads more and holds no text more.
    rounded = np.minimum(-(-cut // step) * step, longest)
    candidates = np.union1d(rounded, [longest])
    texts = np.concatenate(
        [[0], np.cumsum(np.bincount(np.searchsorted(candidates, rounded), minlength=len(candidates)))]
    )
    buckets = min(count, len(candidates))
    # cost[j]: of candidates 0 … j in the buckets so far; before[n][j]: the edge below j in the best choice.
    cost = texts[1:] * candidates
    before: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    costs = [int(cost[-1])]
    for _ in range(buckets - 1):
        following, chosen = cost.copy(), np.full(len(candidates), -1, np.int64)
        for j in range(1, len(candidates)):
            sums = cost[:j] + (texts[j + 1] - texts[1 : j + 1]) * candidates[j]
            best = int(np.argmin(sums))
            if sums[best] < following[j]:
                following[j], chosen[j] = sums[best], best
        before.append(chosen)
        cost = following
        costs.append(int(cost[-1]))
    edges, place = [int(candidates[-1])], len(candidates) - 1
    for chosen in reversed(before):
        if chosen[place] >= 0:
            place = int(chosen[place])
            edges.append(int(candidates[place]))
    return Edges(tuple(reversed(edges)), costs[-1], int(cut.sum()))
