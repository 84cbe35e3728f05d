"""Rates per key: token buckets that may go into debt, so that a request larger than a bucket passes and is paid for."""

from __future__ import annotations

from dataclasses import dataclass, field

from clients.door.keys import Key
from clients.door.problems import Problem
from clients.door.settings import DoorSettings

UNITS = ("requests", "texts", "tokens")


@dataclass(slots=True)
class Bucket:
    """Fills at `rate` a second up to `size`; times are of any steady clock, seconds."""

    rate: float
    size: float
    level: float
    at: float

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken, 0 for now; more than the bucket holds needs it full."""
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now
        missing = min(amount, self.size) - self.level
        return max(0.0, missing / self.rate)

    def take(self, amount: float) -> None:
        """Takes it, into debt if need be."""
        self.level -= amount


@dataclass(slots=True)
class RateLimits:
    """The buckets of all keys, made when a key first calls."""

    settings: DoorSettings
    _buckets: dict[tuple[str, str], tuple[float, Bucket]] = field(default_factory=dict)

    def admit(self, key: Key, now: float) -> None:
        """Takes one request, and looks whether the key still owes tokens.

        Raises:
            Problem: 429, with the time to wait.
        """
        self._check(key, "tokens", 1.0, now)
        self._pass(key, "requests", 1.0, now)

    def texts(self, key: Key, count: int, now: float) -> None:
        """Takes the texts of a request before they are sent.

        Raises:
            Problem: 429, with the time to wait.
        """
        self._pass(key, "texts", float(count), now)

    def spend(self, key: Key, tokens: int, now: float) -> None:
        """Takes the tokens that a request turned out to have."""
        bucket = self._bucket(key, "tokens", now)
        if bucket is not None:
            bucket.wait(0.0, now)
            bucket.take(float(tokens))

    def _pass(self, key: Key, unit: str, amount: float, now: float) -> None:
        bucket = self._check(key, unit, amount, now)
        if bucket is not None:
            bucket.take(amount)

    def _check(self, key: Key, unit: str, amount: float, now: float) -> Bucket | None:
        bucket = self._bucket(key, unit, now)
        if bucket is not None and (wait := bucket.wait(amount, now)) > 0:
            raise Problem(
                429,
                "rate_limit_exceeded",
                f"this key is over its rate; limit: {bucket.rate:g} {unit} a second; try again in {wait:.3f} s",
                type_=unit,
                retry_after_s=wait,
            )
        return bucket

    def _bucket(self, key: Key, unit: str, now: float) -> Bucket | None:
        rate = key.rates.get(f"{unit}_per_s", getattr(self.settings, f"{unit}_per_s"))
        if rate is None:
            return None
        known = self._buckets.get((key.name, unit))
        if known is None or known[0] != rate:  # a key's rate may change with its file
            size = max(1.0, rate * self.settings.burst_s)
            known = self._buckets[key.name, unit] = (rate, Bucket(rate, size, size, now))
        return known[1]
