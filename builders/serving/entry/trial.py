"""A version on trial: it answers a share of the requests, and the served one as large a share as a control.

Both arms are treated alike, taken out of their batch and answered on their own, so that their times can be compared
although they are few. No request is worse off for it than slower: what the candidate fails, or does not answer within
the deadline, the served version answers. So a client never sees the candidate's errors; the counters do.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import EntryConfig
from .dispatch import Dispatcher
from .errors import Refusal
from .metrics import CANDIDATE_REQUESTS, CANDIDATE_SECONDS, ArmName, Outcome, Tally
from .request import Question, read_question, shown
from .tasks import answer_tensors, open_task
from .ticket import Ticket
from .tokenise import Tokeniser, Tokens
from .tracing import Parent

#: Upper edges of the time's buckets, seconds: each a sixth above the one before, from 1 ms to more than a minute.
EDGES: tuple[float, ...] = tuple(float(f"{0.001 * (7 / 6) ** step:.4g}") for step in range(73))
#: The same as the label `le`, which counts all that was not slower; and one for everything.
_NAMES = (*(f"{edge:g}" for edge in EDGES), "+Inf")
#: Threads of each arm, and the most requests that one of them has under way in a process.
THREADS = 4
BOUND = 32

Answer = dict[str, NDArray[Any]] | Refusal


def place_of(request_id: str) -> float:
    """Where a request falls between 0 and 1: below the share the candidate's, in the next share the control's.

    The same id falls on the same place in every process, so that one who asks again is answered by the same version;
    without an id the place is random.
    """
    if not request_id:
        return random.random()  # noqa: S311  (no secret)
    digest = hashlib.blake2s(request_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


@dataclass(frozen=True)
class Asked:
    """A request that was taken out of its batch.

    Attributes:
        texts: TEXT as it came, BYTES [n, 1].
        pairs: TEXT_PAIR, or None.
        parameters: JSON, or an empty string.
        cancelled: says whether the client has given up, also after `execute` has returned.
        send: called once with the tensors of the answer by name, or the refusal.
        parent: its place in its trace.
    """

    texts: NDArray[np.object_]
    pairs: NDArray[np.object_] | None
    parameters: str
    cancelled: Callable[[], bool]
    send: Callable[[Answer], None]
    parent: Parent | None = None


class Arm:
    """Answers requests with one version, in threads of its own.

    Args:
        name: which one.
        config: of this version.
        tokenise: of this version, and used by nobody else.
        dispatcher: calls its lanes.
    """

    def __init__(self, name: ArmName, config: EntryConfig, tokenise: Tokeniser, dispatcher: Dispatcher):
        """See the class."""
        self.name, self.dispatcher = name, dispatcher
        self._config, self._tokenise, self._task = config, tokenise, open_task(config, tokenise)
        self._tokeniser_lock, self._lock = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """Requests that were handed over and are not done yet, those included that nobody waits for any more."""
        return self._under_way

    def start(self, asked: Sequence[Asked], done: Sequence[Callable[[Answer], None]]) -> None:
        """Compute these requests together, as a batch; does not wait.

        Args:
            asked: the requests.
            done: for each, told its answer exactly once, from any thread.
        """
        with self._lock:
            self._under_way += len(asked)
        once = [_Once(tell, self._settled) for tell in done]
        try:
            self._pool.submit(self._work, asked, once)
        except RuntimeError:
            # The trial was closed between a batch's look at it and this: they are answered all the same.
            self._work(asked, once)

    def close(self) -> None:
        """End the threads; nothing may be under way."""
        self._pool.shutdown(wait=True)

    def _settled(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _work(self, asked: Sequence[Asked], done: Sequence[_Once]) -> None:
        try:
            tickets = []
            for one, tell, tokens in zip(asked, done, self._tokens(asked), strict=True):
                if isinstance(tokens, Refusal):
                    tell(tokens)
                    continue
                question, texts = tokens
                ticket = Ticket(texts, question, one.cancelled)
                ticket.late, ticket.parent, ticket.send = True, one.parent, partial(self._finished, tell)
                if ticket.complete:  # no text at all
                    self._finished(tell, ticket)
                else:
                    tickets.append(ticket)
            if tickets:
                self.dispatcher.run(self.dispatcher.route(tickets))
        except Exception as error:  # nobody waits for ever; who was told already is not told again
            for tell in done:
                tell(Refusal("failed", f"the request was not computed: {type(error).__name__}: {shown(error)}"))

    def _tokens(self, asked: Sequence[Asked]) -> list[tuple[Question, list[Tokens]] | Refusal]:
        questions = [self._question(one) for one in asked]
        with self._tokeniser_lock:
            read = iter(self._tokenise.read([question for question in questions if isinstance(question, Question)]))
        found: list[tuple[Question, list[Tokens]] | Refusal] = []
        for question in questions:
            if isinstance(question, Refusal):
                found.append(question)
                continue
            tokens = next(read)
            found.append(tokens if isinstance(tokens, Refusal) else (question, tokens))
        return found

    def _question(self, one: Asked) -> Question | Refusal:
        try:
            return read_question(one.texts, one.pairs, one.parameters, self._config)
        except Exception as error:  # this request alone
            return Refusal("invalid", f"the request cannot be read: {type(error).__name__}: {shown(error)}")

    def _finished(self, tell: Callable[[Answer], None], ticket: Ticket) -> None:
        if ticket.refusal is not None:
            tell(ticket.refusal)
            return
        try:
            tell(answer_tensors(self._task, ticket))
        except Exception as error:  # this request alone
            tell(Refusal("failed", f"no answer could be made: {type(error).__name__}: {shown(error)}"))


class _Once:
    """Hands an answer on the first time it is called, and says so afterwards."""

    def __init__(self, tell: Callable[[Answer], None], settled: Callable[[], None]):
        self._tell, self._settled = tell, settled
        self._left = [None]

    def __call__(self, answer: Answer) -> None:
        try:
            self._left.pop()  # atomic
        except IndexError:
            return
        try:
            self._tell(answer)
        finally:
            # Not before: what is told may hand the request to the other arm, and until then the trial is not idle.
            self._settled()


@dataclass(eq=False)
class _Owed:
    """A request that the candidate is computing.

    Attributes:
        asked: the request.
        until: when the served version is to answer it, by the trial's clock.
        began: when its batch came.
    """

    asked: Asked
    until: float
    began: float


class Trial:
    """Takes requests out of their batches, and sees that each is answered.

    Args:
        version: on trial.
        share: of the requests, for the candidate; the control gets as many. At most a half.
        deadline_s: longest that the candidate may take, seconds.
        candidate: its arm.
        control: the served version's.
        tally: counts.
        clock: seconds, rising.
    """

    def __init__(
        self,
        version: int,
        share: float,
        deadline_s: float,
        candidate: Arm,
        control: Arm,
        tally: Tally,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """See the class."""
        self.version, self.share = version, share
        self._deadline, self._candidate, self._control = deadline_s, candidate, control
        self._tally, self._clock = tally, clock
        self._owed: dict[_Owed, None] = {}
        self._lock = threading.Lock()

    def takes(self, request_id: str) -> Arm | None:
        """The arm that a request falls into and that has room; None for all the others."""
        place = place_of(request_id)
        if place >= 2 * self.share:
            return None
        arm = self._candidate if place < self.share else self._control
        if arm.under_way >= BOUND:
            self._count(arm.name, "skipped")
            return None
        return arm

    def hand_over(self, taken: Sequence[tuple[Arm, Asked]], began: float) -> None:
        """Have these requests of one batch answered; does not wait.

        Args:
            taken: the requests and their arms, as `takes` said.
            began: when their batch came, by the trial's clock.
        """
        if asked := [one for arm, one in taken if arm is self._control]:
            self._control.start(asked, [partial(self._from_control, one, began) for one in asked])
        if asked := [one for arm, one in taken if arm is self._candidate]:
            owed = [_Owed(one, began + self._deadline, began) for one in asked]
            with self._lock:
                self._owed.update(dict.fromkeys(owed))
            self._candidate.start(asked, [partial(self._from_candidate, one) for one in owed])

    def look(self) -> None:
        """Let the served version answer what the candidate has not in time; to be called every now and then."""
        now = self._clock()
        with self._lock:
            late = [one for one in self._owed if one.until <= now]
            for one in late:
                del self._owed[one]
        for _ in late:
            self._count("candidate", "late")
        if late:
            self._instead([one.asked for one in late])

    @property
    def owes(self) -> bool:
        """Requests wait for the candidate, or for their deadline."""
        return bool(self._owed)

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._candidate.under_way and not self._control.under_way

    def close(self) -> None:
        """End the threads, and the candidate's dispatcher; must be idle."""
        self._candidate.close()
        self._control.close()
        self._candidate.dispatcher.close()

    def _from_control(self, asked: Asked, began: float, answer: Answer) -> None:
        self._note("control", answer, began)
        asked.send(answer)

    def _from_candidate(self, owed: _Owed, answer: Answer) -> None:
        with self._lock:
            if owed not in self._owed:
                return  # too late: the served version answers it
            del self._owed[owed]
        if not isinstance(answer, Refusal) or answer.kind == "cancelled":
            self._note("candidate", answer, owed.began)
            owed.asked.send(answer)
        elif answer.kind == "invalid":
            # The request's fault, unless the served version takes it.
            self._control.start([owed.asked], [partial(self._from_second_opinion, owed)])
        else:
            self._count("candidate", "failed")
            self._instead([owed.asked])

    def _from_second_opinion(self, owed: _Owed, answer: Answer) -> None:
        refused = isinstance(answer, Refusal) and answer.kind in ("invalid", "cancelled")
        self._count("candidate", "refused" if refused else "failed")
        owed.asked.send(answer)

    def _instead(self, asked: Sequence[Asked]) -> None:
        self._control.start(asked, [one.send for one in asked])

    def _note(self, arm: ArmName, answer: Answer, began: float) -> None:
        if isinstance(answer, Refusal):
            self._count(arm, "refused" if answer.kind in ("invalid", "cancelled") else "failed")
            return
        self._count(arm, "answered")
        seconds = self._clock() - began
        self._tally.add_each(CANDIDATE_SECONDS, ((arm, name) for name in _NAMES[bisect_left(EDGES, seconds) :]))

    def _count(self, arm: ArmName, outcome: Outcome) -> None:
        self._tally.add(CANDIDATE_REQUESTS, labels=(arm, outcome))
