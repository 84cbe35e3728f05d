"""Watches the entry's own queue: past a number of waiting requests, batches are to be small.

Under backlog Triton makes batches larger, never smaller, and a request is answered with its whole batch. Full batches
are normal at healthy saturation and no sign of backlog; the number of waiting requests is, and only Triton's metrics
tell it.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable

from .config import DegradeConfig

#: Fewer than `below` for so long before batches are normal again, seconds.
HOLD_S = 0.5
#: Looks go on for so long after the last batch, seconds.
BUSY_S = 1.0
PENDING = "nv_inference_pending_request_count"
#: Set by whoever starts the server, to the address of its metrics; it goes before `entry.degrade.metrics_url`.
METRICS_URL_VARIABLE = "ENCODER_LANES_METRICS_URL"


class PendingCount:
    """Reads how many requests wait in a model's queue; one connection, kept open. Not for several threads.

    Args:
        url: of the server's metrics.
        model: name of the model.
        version: of the model.
        timeout_s: longest wait for an answer, seconds.
    """

    def __init__(self, url: str, model: str, version: int, timeout_s: float = 1.0):
        """See the class; nothing is read yet."""
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
        self._path = parts.path or "/"
        self._labels = (f'model="{model}"'.encode(), f'version="{version}"'.encode())

    def __call__(self) -> float:
        """The number of waiting requests.

        Raises:
            OSError, http.client.HTTPException: the metrics cannot be read.
            LookupError: the model is not in them.
        """
        try:
            self._connection.request("GET", self._path)
            response = self._connection.getresponse()
            page = response.read()
        except BaseException:
            self._connection.close()  # the next call makes a new one
            raise
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"HTTP {response.status}")
        return pending(page, self._labels)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def pending(page: bytes, labels: tuple[bytes, ...]) -> float:
    """The value of `PENDING` with these labels in a page of metrics; without splitting a page of some 100 kB.

    Raises:
        LookupError: it is not there.
    """
    name = f"\n{PENDING}{{".encode()
    begin = page.find(name)
    while begin >= 0:
        end = page.find(b"\n", begin + 1)
        line = page[begin : end if end >= 0 else len(page)]
        if all(label in line for label in labels):
            return float(line.rsplit(b" ", 1)[1])
        begin = page.find(name, begin + 1)
    raise LookupError(f"{PENDING} has no sample with {b' and '.join(labels).decode()}")


class BacklogWatch:
    """Says whether batches are to be small.

    Past `above` waiting requests they are; again normal once fewer than `below` have waited for `HOLD_S`. Nothing is
    read while the entry is idle.

    Args:
        read: tells the number of waiting requests; may raise, and batches are normal then.
        config: the thresholds and the interval.
        switched: told each switch: (small, waiting requests). From the watch's own thread.
        failed: told the first error of `read` after a success.
        clock: seconds, rising.
    """

    def __init__(
        self,
        read: Callable[[], float],
        config: DegradeConfig,
        switched: Callable[[bool, float], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """See the class; `start` starts the thread."""
        self._read, self._config, self._clock = read, config, clock
        self._switched, self._failed = switched, failed
        self._small = self._failing = False
        self._low_since: float | None = None
        self._busy_until = float("-inf")
        self._busy, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="backlog", daemon=True)

    @property
    def batch(self) -> int | None:
        """Texts of a batch now; None: as many as the bucket takes."""
        return self._config.batch if self._small else None

    def start(self) -> None:
        """Begin to look, from the first batch on."""
        self._thread.start()

    def busy(self) -> None:
        """A batch has come."""
        self._busy_until = self._clock() + BUSY_S
        if not self._busy.is_set():
            self._busy.set()

    def look(self) -> None:
        """Read once and decide."""
        try:
            waiting = self._read()
        except Exception as error:  # without a number no degrading, and no harm either
            if not self._failing:
                self._failed(error)
            self._failing = True
            self._low_since = None
            self._switch(False, float("nan"))
            return
        self._failing = False
        if waiting >= self._config.below:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = self._clock()
        if waiting >= self._config.above:
            self._switch(True, waiting)
        elif self._low_since is not None and self._clock() - self._low_since >= HOLD_S:
            self._switch(False, waiting)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._busy.set()
        if self._thread.is_alive():
            self._thread.join()

    def _switch(self, small: bool, waiting: float) -> None:
        if small != self._small:
            self._small = small
            self._switched(small, waiting)

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            if self._closed.wait(self._config.interval_s):
                return
            self.look()
            # While batches are small it looks on, or the next burst would begin with small ones.
            if not self._small and self._clock() > self._busy_until:
                self._busy.clear()
                if self._closed.is_set() or self._clock() <= self._busy_until:
                    self._busy.set()  # it was set while it was cleared
