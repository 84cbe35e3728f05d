"""A process's own first calls to the lanes, made before its first client's.

Two things are slow once in each process: the first request that Triton hands to it (0.13 s, in Triton itself) and the
first large batches to the lanes, for which shared memory grows. The first is taken by a `model_warmup` in the entry's
configuration, which `execute` answers by itself, since the lanes may not be there yet. The second is made here, by a
thread that starts with that warm-up.

Not earlier: until Triton has come back from `initialize`, what the server needs for a model's calls is not there, and
one call in that moment ends the server with a segmentation fault (2.51; docs/queue.md). That a request was executed is
the one sign that it is over. Calls made after it, while the server loads other models, are refused and made again.
Triton says "ready" a moment before they are through; a counter says when they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .config import BucketRoute

#: Of the error while the server is still loading the models of its start, or the lane's.
NOT_YET = ("Server not ready", "is not at ready state")
#: Between two tries meanwhile, seconds.
RETRY_S = 0.1
#: Rounds over all lanes; in the second one nothing is new any more.
ROUNDS = 2
#: Longest wait for a call that is under way when the model is unloaded, seconds. While Triton takes an instance down it
#: may leave a call unanswered, and it waits for `finalize` without limit.
CLOSE_S = 5.0


class FirstCalls:
    """Makes the first calls in a thread of its own, once started.

    Args:
        routes: the buckets, in rising length.
        call: one full batch to a lane, waited for.
        done: told once, when all is done or given up; not when it was closed before.
        warn: told what failed; the rest is done all the same.
    """

    def __init__(
        self,
        routes: Sequence[BucketRoute],
        call: Callable[[BucketRoute], None],
        done: Callable[[], None],
        warn: Callable[[str], None],
    ):
        """See the class."""
        self._routes, self._call = tuple(routes), call
        self._done, self._warn = done, warn
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun. For `execute` alone, which Triton calls from one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="first-calls", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop before the model is unloaded; a call that is under way is waited for, up to `CLOSE_S`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while not self._try(self._routes[0]):
            if self._stop.wait(RETRY_S):
                return
        # All lanes at once, as a mixed batch calls them: the shared memory must hold them together.
        with ThreadPoolExecutor(len(self._routes), thread_name_prefix="first-call") as pool:
            for _ in range(ROUNDS):
                if not self._stop.is_set():
                    list(pool.map(self._try, self._routes))
        if not self._stop.is_set():
            self._done()

    def _try(self, route: BucketRoute) -> bool:
        """One call; False when none are taken yet. One that fails otherwise, since a lane is not there, is left out."""
        try:
            self._call(route)
        except Exception as error:  # a cold process answers, too
            if any(part in str(error) for part in NOT_YET):
                return False
            self._warn(f"the first call of {route.model} failed: {error}")
        return True
