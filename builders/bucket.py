"""The buckets a deployment really serves: length, lane, largest batch, batch steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from builders.errors import SettingsError
from builders.names import lane_model
from builders.settings import DeploySettings

LaneName = Literal["short", "long"]


@dataclass(frozen=True)
class Bucket:
    """One bucket model.

    Attributes:
        length: tokens a text is padded to.
        index: place among the served buckets; also the number of its optimisation profile.
        lane: the lane it belongs to.
        batch: largest batch, texts.
        steps: batch sizes that are warmed up (and get a CUDA graph), rising; the last one is `batch`.
        late: a short bucket whose answers leave when they are done.
        name: of the model it belongs to; empty where there is one alone.
    """

    length: int
    index: int
    lane: LaneName
    batch: int
    steps: tuple[int, ...]
    late: bool
    name: str = ""

    @property
    def model(self) -> str:
        """Name of the Triton model."""
        return lane_model(self.name, self.length)


@dataclass(frozen=True)
class BucketPlan:
    """What is served, what was left out and why."""

    buckets: tuple[Bucket, ...]
    max_tokens: int
    left_out: tuple[int, ...]
    positions: int
    lowered_from: int | None = None

    @property
    def notice(self) -> str | None:
        """One line about the buckets that were left out and a limit that was lowered, or None."""
        parts = []
        if self.left_out:
            names = ", ".join(str(length) for length in self.left_out)
            takes = f"the model has {self.positions} positions and takes {self.max_tokens} tokens"
            parts.append(f"buckets left out: {names} ({takes})")
        if self.lowered_from is not None:
            parts.append(
                f"texts are cut at the longest bucket, {self.max_tokens} tokens; the model takes {self.lowered_from}"
            )
        return "; ".join(parts) or None

    def bucket_of(self, tokens: int) -> Bucket:
        """The smallest bucket that holds a text of `tokens` tokens.

        Raises:
            ValueError: longer than the longest bucket.
        """
        for bucket in self.buckets:
            if tokens <= bucket.length:
                return bucket
        raise ValueError(f"{tokens} tokens are above the longest bucket, {self.buckets[-1].length}")


def plan_buckets(settings: DeploySettings, *, positions: int, max_tokens: int) -> BucketPlan:
    """Choose the buckets that this model can fill.

    A bucket above the model's positions cannot run, one above the first that holds `max_tokens` would never be used.

    Args:
        settings: the deployment.
        positions: positions of the model, tokens.
        max_tokens: longest text the model takes, tokens.

    Raises:
        SettingsError: no bucket is within the positions, or the user's own `max_tokens` is above the longest bucket.
    """
    lowered_from = None
    usable = [length for length in settings.buckets if length <= positions]
    if not usable:
        raise SettingsError(
            "no bucket is within the model's positions",
            value=list(settings.buckets),
            limit=f"at most {positions} tokens",
            remedy="add a shorter bucket, or set model.tile_positions",
        )
    if max_tokens > usable[-1]:
        if settings.model.max_tokens is not None:
            raise SettingsError(
                "model.max_tokens is above the longest usable bucket",
                value=max_tokens,
                limit=f"{usable[-1]} tokens",
                remedy=f"set model.max_tokens to {usable[-1]}, or add a bucket of up to {positions}",
            )
        lowered_from, max_tokens = max_tokens, usable[-1]
    needed = sum(length < max_tokens for length in usable) + 1
    kept = usable[:needed]
    return BucketPlan(
        buckets=tuple(_bucket(settings, index, length) for index, length in enumerate(kept)),
        max_tokens=max_tokens,
        left_out=tuple(length for length in settings.buckets if length not in kept),
        positions=positions,
        lowered_from=lowered_from,
    )


class EngineBucket(Protocol):
    """A bucket of a built engine: its length, its profile and its largest batch are fixed."""

    @property
    def length(self) -> int:
        """Tokens a text is padded to."""
        ...

    @property
    def index(self) -> int:
        """Number of the optimisation profile."""
        ...

    @property
    def batch(self) -> int:
        """Largest batch the engine takes."""
        ...


def plan_built(
    settings: DeploySettings, built: Sequence[EngineBucket], *, positions: int, max_tokens: int
) -> BucketPlan:
    """The plan of a version that was built before, perhaps with other settings.

    Lengths, profiles and largest batches are the engine's; lanes and batch steps follow the settings of today.
    """
    buckets = []
    for part in built:
        bucket = _bucket(settings, part.index, part.length)
        batch = min(bucket.batch, part.batch)
        steps = (*(step for step in bucket.steps if step < batch), batch)
        buckets.append(replace(bucket, batch=batch, steps=steps))
    return BucketPlan(buckets=tuple(buckets), max_tokens=max_tokens, left_out=(), positions=positions)


def _bucket(settings: DeploySettings, index: int, length: int) -> Bucket:
    short = settings.lanes.short
    name: LaneName = "short" if length <= short.up_to else "long"
    wanted = short.batch if name == "short" else settings.lanes.long.batch
    # One text at least: the bound on tokens is there for speed or memory of full batches, not to refuse a text.
    batch = min(wanted, settings.engine.max_batch, max(1, settings.engine.max_batch_tokens // length))
    steps = (*(step for step in settings.engine.batch_steps if step < batch), batch)
    late = name == "short" and short.late_from is not None and length >= short.late_from
    return Bucket(length, index, name, batch, steps, late, settings.name)
