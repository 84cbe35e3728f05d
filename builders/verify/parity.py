"""Parity layer by layer: where a candidate leaves the FP32 reference, not only that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from builders.verify.runner import OUTPUT, OUTPUTS, Floats, Ids, Runner, VerifyError, ask, output_of

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class ParityLine:
    """What a block must keep to."""

    cosine: float
    """Least cosine of one token's vector (of one row's, after pooling) to the reference's."""
    channel_error: float
    """Largest RMS error of one channel over all positions, as a share of that channel's RMS in the reference.
    The cosine alone is blind beside a channel 500 times as large as the others."""
    score_error: float
    """Largest difference of one score, of a token's score, or of a start or end logit. Where the reference's scores of
    the case reach above 1, they are no probabilities and it is a share of the largest. A direction says nothing of
    scores: one label has none, and eleven labels near 0 beside one near 1 hide what happens among them."""


LINES: Mapping[str, ParityLine] = MappingProxyType(
    {
        "fp32": ParityLine(cosine=0.99999, channel_error=0.005, score_error=0.001),
        # A healthy FP16 plan of TensorRT 8.6, which adds up in FP16, reached 0.08 on an H200 (docs/measurements/); FP16
        # norms beside a channel x 500 are far above.
        "fp16": ParityLine(cosine=0.9998, channel_error=0.1, score_error=0.03),
        "bf16": ParityLine(cosine=0.995, channel_error=0.2, score_error=0.2),
        "fp8": ParityLine(cosine=0.98, channel_error=0.5, score_error=0.5),
        # Static int8 of MiniLM reached 0.991 and 0.114 (the worst token; texts' vectors 0.9991 in the mean). With one
        # scale for all channels and nothing smoothed: 0.953 and 0.34. The task metric judges what is between.
        "int8": ParityLine(cosine=0.98, channel_error=0.25, score_error=0.2),
    }
)
"""Lines by precision of the candidate. FP16: 0.9998 where plain weak typing in TensorRT 8.6 reached 0.9996 (FACTS.md).
FP32 holds re-ordered sums apart from changed arithmetic. BF16 has 3 bits less than FP16; FP8 and INT8 are judged by the
task metric in the first place."""


@dataclass(frozen=True)
class ParityCase:
    """One padded batch: `lengths[i]` real tokens in row i of a batch padded to `bucket` tokens."""

    bucket: int
    lengths: tuple[int, ...]
    segments: tuple[int, ...] | None = None
    """First token of each row's second text, its length where there is none; None for a model without segments."""

    def __str__(self) -> str:
        """For a report: bucket, batch, lengths, whether there are pairs."""
        shown = ", ".join(map(str, self.lengths[:6])) + (", ..." if len(self.lengths) > 6 else "")
        pairs = ", pairs" if self.paired else ""
        return f"bucket {self.bucket}, batch {len(self.lengths)}, lengths {shown}{pairs}"

    @property
    def paired(self) -> bool:
        """A row has a second text."""
        return self.segments is not None and self.segments != self.lengths

    @property
    def segment_start(self) -> Ids | None:
        """INT32 [b, 1], or None for a model without segments."""
        return None if self.segments is None else np.array(self.segments, dtype=np.int32)[:, None]


@dataclass(frozen=True)
class BlockParity:
    """One block over all cases."""

    name: str
    cosine: float
    """Worst cosine; -1 where either side is not finite. Of scores it is not judged, and 1."""
    error: float | None
    """Largest absolute difference of one value; None where the candidate is not finite."""
    channel_error: float | None
    """See `ParityLine.channel_error`; None where the candidate is not finite."""
    finite: bool
    """Every value of the candidate, padding and rows of length 0 included."""
    where: str
    """The case and row of the worst cosine, of scores of the largest difference."""
    passed: bool
    score_error: float | None = None
    """See `ParityLine.score_error`; None for vectors, and where the candidate is not finite."""

    @property
    def found(self) -> str:
        """The figure that is judged, in words."""
        if not self.finite:
            return "not finite"
        if self.score_error is not None:
            return f"scores off by {self.score_error:.3g}"
        return f"cosine {self.cosine:.6f}, channel {self.channel_error:.3g}"


@dataclass(frozen=True)
class ParityReport:
    """All blocks, in the order of the graph."""

    line: ParityLine
    blocks: tuple[BlockParity, ...]
    cases: int
    """Batches compared."""
    not_compared: tuple[str, ...]
    """Blocks of the reference that the candidate does not show (an engine shows only marked outputs)."""
    failures: tuple[str, ...]
    """Cases that the candidate could not run, each with the engine's message."""
    passed: bool

    @property
    def worst(self) -> BlockParity | None:
        """The block with the lowest cosine; None when nothing could be compared."""
        return min(self.blocks, key=lambda block: block.cosine, default=None)

    @property
    def first_below(self) -> BlockParity | None:
        """The first block that misses the line: the fault lies between it and the block before it."""
        return next((block for block in self.blocks if not block.passed), None)

    def summary(self) -> str:
        """One line: verdict, worst layer, first layer below the line."""
        if self.failures:
            return f"parity fails: {len(self.failures)} of {self.cases} batches do not run: {self.failures[0]}"
        worst, first = self.worst, self.first_below
        if worst is None:
            return "parity fails: nothing was compared"
        text = f"worst layer {worst.name}: cosine {worst.cosine:.6f} ({worst.where}); line {self.line.cosine}"
        for block in self.blocks:
            if block.score_error is not None:
                text += f"; {block.name} off by {block.score_error:.2g} at most, line {self.line.score_error}"
        if first is None:
            return f"parity holds: {text}"
        at = f", {first.where}" if first.score_error is not None else ""
        return f"parity fails: first layer below the line {first.name} ({first.found}{at}); {text}"


def parity_cases(
    buckets: Mapping[int, int], *, batches: Sequence[int] = (2, 5), max_tokens: int = 4096, segments: bool = False
) -> tuple[ParityCase, ...]:
    """Batches that cover every bucket: lengths 1, 2, 7, bucket - 1 and bucket, alone and mixed.

    The last row of a mixed batch of three or more has length 0: its vector has no meaning but must be finite.

    Args:
        buckets: bucket length -> largest batch; one optimisation profile each.
        batches: batch sizes of the mixed batches, besides 1 and the bucket's largest.
        max_tokens: a mixed batch of more padded tokens than this is left out (memory and time of the comparison).
        segments: the model takes segment_start: every batch is run as single texts, and the bucket's longest text and
            its mixed batches as pairs besides.
    """
    cases = []
    for bucket, most in buckets.items():
        lengths = sorted({length for length in (1, 2, 7, bucket - 1, bucket) if 1 <= length <= bucket}, reverse=True)
        cases += [ParityCase(bucket, (length,)) for length in lengths]
        # Longest and shortest side by side: what leaks across rows or from the padding shows there.
        order = [length for pair in zip(lengths, reversed(lengths), strict=True) for length in pair][: len(lengths)]
        for batch in sorted({*batches, most}):
            if 1 < batch <= most and batch * bucket <= max_tokens:
                rows = [order[i % len(order)] for i in range(batch)]
                cases.append(ParityCase(bucket, (*rows[:-1], 0) if batch > 2 else tuple(rows)))
    return tuple(_with_segments(cases)) if segments else tuple(cases)


def _with_segments(cases: Sequence[ParityCase]) -> Iterator[ParityCase]:
    for case in cases:
        yield ParityCase(case.bucket, case.lengths, case.lengths)
        if len(case.lengths) > 1 or case.lengths[0] == case.bucket:
            # A third of the row, in turn all but its last token: the second text long and short.
            starts = (length // 3 if row % 2 == 0 else max(0, length - 1) for row, length in enumerate(case.lengths))
            yield ParityCase(case.bucket, case.lengths, tuple(starts))


def make_batch(case: ParityCase, stream: Ids, seed: int = 0) -> tuple[Ids, Ids]:
    """Token numbers of a case, each row a window of `stream`; the padding holds other tokens of it.

    Args:
        case: the batch to make.
        stream: INT32 [n], token numbers of real texts one after the other (`data.token_stream`).
        seed: equal seeds give equal batches.

    Returns:
        `input_ids` INT32 [b, bucket] and `length` INT32 [b, 1].
    """
    random = np.random.default_rng([seed, case.bucket, *case.lengths])
    starts = random.integers(0, len(stream), len(case.lengths))
    ids = stream[(starts[:, None] + np.arange(case.bucket)) % len(stream)].astype(np.int32)
    return ids, np.array(case.lengths, dtype=np.int32)[:, None]


def compare(
    reference: Runner, candidate: Runner, cases: Sequence[ParityCase], stream: Ids, line: ParityLine
) -> ParityReport:
    """Run every case on both sides and compare every block at the real positions.

    Args:
        reference: the FP32 graph; it decides which blocks there are and their order.
        candidate: what is judged; blocks it does not show are listed, not compared.
        cases: the batches (`parity_cases`).
        stream: see `make_batch`.
        line: what a block must keep to.

    Raises:
        VerifyError: the reference does not run, is not finite, or the two disagree about a block's shape.
    """
    tallies: dict[str, _Tally] = {}
    missing: dict[str, None] = {}
    failures: list[str] = []
    for case in cases:
        ids, length = make_batch(case, stream)
        expected = ask(reference, ids, length, case.segment_start)
        try:
            got = ask(candidate, ids, length, case.segment_start)
        except VerifyError as error:
            failures.append(f"{case}: {error}")
            continue
        missing |= dict.fromkeys(name for name in expected if name not in got)
        for name in [name for name in expected if name in got]:
            if got[name].shape != expected[name].shape:
                raise VerifyError(
                    f"block {name} has another shape in the candidate",
                    value=got[name].shape,
                    limit=str(expected[name].shape),
                    remedy="compare graphs of one model",
                )
            tallies.setdefault(name, _Tally()).add(expected[name], got[name], case, name)
    if output := output_of(dict.fromkeys(missing)):
        raise VerifyError("the candidate does not return its output", value=output, remedy="name the output so")
    blocks = tuple(tally.result(name, line) for name, tally in tallies.items())
    passed = bool(blocks) and not failures and all(block.passed for block in blocks)
    return ParityReport(line, blocks, len(cases), tuple(missing), tuple(failures), passed)


class _Tally:
    """Running figures of one block."""

    def __init__(self) -> None:
        self.cosine, self.where, self.error, self.finite = 2.0, "", 0.0, True
        self.score_error: float | None = None
        self.count = 0
        self.squares: Doubles | None = None
        self.squared_errors: Doubles | None = None

    def add(self, expected: Floats, got: Floats, case: ParityCase, name: str) -> None:
        """Take in one batch, [b, L, hidden] or [b, hidden]."""
        rows, wanted, found = _real(expected, got, case)
        if not np.isfinite(wanted).all():
            raise VerifyError(f"the reference is not finite in {name}", value=str(case), remedy="use another model")
        if not np.isfinite(got).all():
            if self.finite:
                self.where = _place(case, int(np.argwhere(~np.isfinite(got))[0][0]))
            self.finite, self.cosine = False, -1.0
            return
        if not len(rows):
            return
        difference = found - wanted
        self.error = max(self.error, float(np.abs(difference).max()))
        if name in OUTPUTS and name != OUTPUT:
            self._add_scores(wanted, np.abs(difference).max(-1), rows, case)
            return
        cosines = _cosines(wanted, found)
        lowest = int(np.argmin(cosines))
        if cosines[lowest] < self.cosine:
            self.cosine, self.where = float(cosines[lowest]), _place(case, int(rows[lowest]))
        self.count += len(rows)
        squares, errors = (wanted**2).sum(0), (difference**2).sum(0)
        self.squares = squares if self.squares is None else self.squares + squares
        self.squared_errors = errors if self.squared_errors is None else self.squared_errors + errors

    def _add_scores(self, wanted: Doubles, differences: Doubles, rows: NDArray[np.int64], case: ParityCase) -> None:
        worst = int(np.argmax(differences))
        error = float(differences[worst] / max(1.0, float(np.abs(wanted).max())))
        if self.score_error is None or error > self.score_error:
            self.score_error, self.where = error, _place(case, int(rows[worst]))

    def result(self, name: str, line: ParityLine) -> BlockParity:
        """The block's row of the report."""
        if self.score_error is not None:
            score = self.score_error if self.finite else None
            passed = score is not None and score <= line.score_error
            cosine, error = (1.0, self.error) if self.finite else (-1.0, None)
            return BlockParity(name, cosine, error, None, self.finite, self.where, passed, score)
        error, channel = (self.error, self._channel_error()) if self.finite else (None, None)
        passed = self.cosine >= line.cosine and channel is not None and channel <= line.channel_error
        return BlockParity(name, min(self.cosine, 1.0), error, channel, self.finite, self.where, passed)

    def _channel_error(self) -> float:
        if self.squares is None or self.squared_errors is None:
            return 0.0
        rms, errors = np.sqrt(self.squares / self.count), np.sqrt(self.squared_errors / self.count)
        # A channel that is almost off has no scale of its own: rounding of its neighbours would read as its fault.
        return float((errors / np.maximum(rms, max(0.1 * float(np.median(rms)), 1e-12))).max())


def _place(case: ParityCase, row: int) -> str:
    pairs = ", pairs" if case.paired else ""
    return f"bucket {case.bucket}, batch {len(case.lengths)}, length {case.lengths[row]}{pairs}"


def _real(expected: Floats, got: Floats, case: ParityCase) -> tuple[NDArray[np.int64], Doubles, Doubles]:
    """Row numbers and FP64 vectors [n, hidden] of the real positions (of rows longer than 0, after pooling)."""
    lengths = np.array(case.lengths)
    mask = np.arange(expected.shape[1]) < lengths[:, None] if expected.ndim == 3 else lengths > 0
    rows = np.argwhere(mask)[:, 0]
    return rows, expected[mask].astype(np.float64), got[mask].astype(np.float64)


def _cosines(a: Doubles, b: Doubles) -> Doubles:
    """Cosine of each row pair; two zero vectors are equal (1), one zero vector is not (0)."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    equal = (a == b).all(axis=-1)
    cosines: Doubles = np.where(equal, 1.0, (a * b).sum(-1) / np.maximum(norms, 1e-30))
    return cosines


def describe(report: ParityReport) -> Iterator[str]:
    """The table of a terminal, a line per block."""
    yield f"{'block':<28} {'cosine':>10} {'max error':>10} {'channel':>8}"
    for block in report.blocks:
        error = "not finite" if block.error is None else f"{block.error:.3g}"
        channel = "" if block.channel_error is None else f"{block.channel_error:.2%}"
        if block.score_error is not None:
            yield f"{block.name:<28} {'scores':>10} {error:>10} {'':>8}{'' if block.passed else '  off the line'}"
            continue
        mark = "" if block.passed else "  below the line"
        yield f"{block.name:<28} {block.cosine:>10.6f} {error:>10} {channel:>8}{mark}"
