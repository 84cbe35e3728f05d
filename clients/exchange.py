"""The state of one call: which request is next, which is tried again, what its answers are in order. No IO, no clock.

A client drives it: it takes requests and sends them, settles each outcome, and waits for outcomes in between, at most
`pause` seconds. The synchronous client and the asyncio one are that loop, and nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clients.errors import DeadlineExceeded
from clients.failures import TransportError, from_status
from clients.retry import Retry, RetryBudget, RetryPolicy
from clients.wire import InferAnswer, InferRequest


@dataclass(slots=True)
class _Part:
    """A request of the call."""

    texts: range
    request: InferRequest
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer and the positions of its texts."""

    texts: range
    answer: InferAnswer


class Exchange:
    """One call's requests, from the first sent to the last answered.

    Args:
        parts: the texts of each request, as positions in the call; one after another.
        build: makes the request of a part, when it is about to be sent.
        concurrency: most requests under way, those that wait for a retry among them: a server that refuses is sent
            less, not something else meanwhile.
        ends: when the call's deadline passes, on the clock of `now`; None never.
        policy: the client's retries.
        budget: what it has left of them.
        url: for messages.
    """

    def __init__(
        self,
        parts: Sequence[range],
        build: Callable[[range], InferRequest],
        *,
        concurrency: int,
        ends: float | None,
        policy: RetryPolicy,
        budget: RetryBudget,
        url: str,
    ) -> None:
        """Nothing is built or sent yet."""
        self._parts, self._build, self._concurrency = parts, build, concurrency
        self._ends, self._policy, self._budget, self._url = ends, policy, budget, url
        self._next = self._given = 0
        self._busy: dict[int, _Part] = {}
        self._due: list[tuple[float, int]] = []  # heap of retries: when, which
        self._answers: dict[int, Answered] = {}
        self.retries = 0
        self.done_texts = 0

    @property
    def finished(self) -> bool:
        """All answers have been given out."""
        return self._given == len(self._parts)

    def take(self, now: float) -> tuple[int, InferRequest] | None:
        """Number and request to send now; None when there is none, or as many as allowed are under way.

        Raises:
            DeadlineExceeded: the deadline passed before this request was sent.
        """
        if self._due and self._due[0][0] <= now:
            number = heapq.heappop(self._due)[1]
            self._check_time(now, self._busy[number].texts)
            return number, self._busy[number].request
        if self._next == len(self._parts) or len(self._busy) >= self._concurrency:
            return None
        texts = self._parts[self._next]
        self._check_time(now, texts)
        self._busy[self._next] = _Part(texts, self._build(texts))
        self._next += 1
        return self._next - 1, self._busy[self._next - 1].request

    def pause(self, now: float) -> float | None:
        """Longest time to wait for outcomes before the next `take`, seconds; None as long as it takes."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def settle(self, number: int, outcome: InferAnswer | TransportError, now: float) -> None:
        """Takes the outcome of a request in: keeps an answer, plans a retry.

        Raises:
            EncoderError: the request failed for good, and the call with it.
        """
        part = self._busy[number]
        if isinstance(outcome, InferAnswer):
            del self._busy[number]
            self._budget.earn()
            self._answers[number] = Answered(part.texts, outcome)
            self.done_texts += len(part.texts)
            return
        error = from_status(outcome.status, outcome.message, self._url, part.texts)
        error.retries = self.retries
        delay = self._policy.delay(part.retries + 1)
        late = self._ends is not None and now + delay >= self._ends
        if not error.refused or late or part.retries >= self._policy.limit or not self._budget.spend():
            raise error
        part.retries += 1
        self.retries += 1
        heapq.heappush(self._due, (now + delay, number))
        if self._policy.on_retry is not None:
            self._policy.on_retry(Retry(part.texts, part.retries, delay, error))

    def ordered(self) -> Iterator[Answered]:
        """The answers that are next in the order of the texts, each once."""
        while self._given in self._answers:
            self._given += 1
            yield self._answers.pop(self._given - 1)

    def _check_time(self, now: float, texts: range) -> None:
        if self._ends is not None and now >= self._ends:
            error = DeadlineExceeded(
                "the call's deadline passed before these were sent",
                remedy="give a longer deadline= or fewer texts",
                url=self._url,
                texts=texts,
            )
            error.retries = self.retries
            raise error
