"""When a refused request is sent again, and how long the client waits before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from clients.errors import EncoderError, InvalidInput
from clients.options import seconds, whole


@dataclass(frozen=True, slots=True)
class Retry:
    """One retry about to be made, as `RetryPolicy.on_retry` is told."""

    texts: range
    """Positions, in the call, of the texts of the request."""
    number: int
    """1 for the first retry of this request."""
    delay: float
    """Seconds until it is sent."""
    error: EncoderError
    """Why."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries of requests that were surely not computed: queue timeout, full queue, no connection.

    A request that the server may have computed is never sent again: not after a deadline, an internal error or a
    connection lost on the way. The delay before retry k is `first * 2**(k-1)` seconds, at most `longest`, of which a
    random half is taken off, so that clients refused together do not come back together. A retry that the call's
    deadline leaves no time for is not waited for: the call fails with the refusal at once.

    Clients that all retry keep an overloaded server overloaded. Hence a budget for the whole client, as in gRPC's retry
    throttling (proposal A6): each retry takes one from it, each answered request gives back a tenth; while it is empty
    nothing is retried.

    Args:
        limit: most retries of one request, 0 (none) to 100.
        first: longest delay before the first retry, seconds.
        longest: longest delay of all, seconds.
        budget: retries of the whole client in a row, without any answer between, 1 to 1,000,000.
        on_retry: called before each retry's delay, in the caller's thread; must not block.

    Raises:
        InvalidInput: an argument is outside its limits.

    Example:
        >>> from clients import EncoderClient, RetryPolicy
        >>> with EncoderClient("127.0.0.1:8001", retry=RetryPolicy(limit=5, longest=2.0)) as client:
        ...     result = client.encode("a text")
        >>> result.retries
        0
    """

    limit: int = 2
    first: float = 0.05
    longest: float = 1.0
    budget: int = 20
    on_retry: Callable[[Retry], None] | None = None

    def __post_init__(self) -> None:
        """Checks the limits."""
        whole("retry limit", self.limit, 100, least=0)
        whole("retry budget", self.budget, 1_000_000)
        if seconds("retry longest", self.longest) < seconds("retry first", self.first):
            raise InvalidInput(
                "the longest delay is below the first", value=self.longest, limit=f"{self.first} seconds"
            )

    def delay(self, number: int) -> float:
        """Seconds before retry `number` of a request, 1 for the first."""
        # The exponent is bounded because a float is.
        bound: float = min(self.longest, self.first * 2.0 ** min(number - 1, 60))
        return bound * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


class RetryBudget:
    """The retries a client has left; see RetryPolicy. May be used from several threads."""

    def __init__(self, size: int) -> None:
        """Starts full."""
        self._size = self._left = 10 * size  # in tenths, exact
        self._lock = threading.Lock()

    def spend(self) -> bool:
        """Takes one; False when there is none."""
        with self._lock:
            if self._left < 10:
                return False
            self._left -= 10
            return True

    def earn(self) -> None:
        """Gives a tenth back for an answered request."""
        with self._lock:
            self._left = min(self._size, self._left + 1)
