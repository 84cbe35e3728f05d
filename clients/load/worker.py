"""One process of the generator: an event loop that sends its share of the requests and notes what comes of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from clients.load.plan import Request
from clients.load.records import OK, Records
from clients.load.target import Sender, Target, connected

_REPORT_S = 0.25
#: Of a closed loop's client after a failure: a server that refuses at once would only be hammered.
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        target: the server.
        requests: in the order they are due; a closed loop takes them in turn, over and over.
        clients: of the closed loop in this process; 0 for the open loop.
        seconds: of the closed loop.
    """

    target: Target
    requests: tuple[Request, ...]
    clients: int
    seconds: float


class Progress(NamedTuple):
    """Requests so far."""

    sent: int
    done: int
    failed: int


class Failed(NamedTuple):
    """The process cannot go on."""

    message: str


class Ready(NamedTuple):
    """The process is connected and waits for the start time."""


class Stop(NamedTuple):
    """The parent's word that it is enough: what has been answered is sent back, the rest is given up."""


Message = Ready | Progress | Failed | Records


def work(pipe: Connection) -> None:
    """Body of the process: does one `Job` after the other, until the parent closes the pipe.

    For each it says `Ready` when it is connected, gets the start (on time.monotonic, one clock for all), runs and sends
    the records: all of them, or at a `Stop` those there are.
    """
    try:
        while True:
            message = pipe.recv()
            if isinstance(message, Job):  # else a `Stop` that crossed with the records
                _do(message, pipe)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the parent has closed the pipe or is gone, or Ctrl-C, of which it has been told as well
    finally:
        pipe.close()


def _do(job: Job, pipe: Connection) -> None:
    try:
        pipe.send(asyncio.run(_work(job, pipe)))
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
    finally:
        gc.enable()


async def _work(job: Job, pipe: Connection) -> Records:
    async with connected(job.target) as sender:
        pipe.send(Ready())
        start = float(await asyncio.to_thread(pipe.recv))
        # A collection of all that was loaded would make requests late; nothing of a run is cyclic garbage to speak of.
        gc.collect()
        gc.freeze()
        gc.disable()
        run = Run(sender, start, pipe.send)
        began = _busy_s()
        if await _cut_short(run.closed(job) if job.clients else run.open(job.requests), pipe):
            run.records.cut_s = max(time.monotonic() - start, 1e-3)
            run.records.given_up = run.under_way
        run.records.busy = (_busy_s() - began) / max(time.monotonic() - start, 1e-3)
        run.records.said = sender.said
        return run.records


async def _cut_short(work: Coroutine[Any, Any, None], pipe: Connection) -> bool:
    """Runs the load to its end, or until the parent says `Stop`; whether it did.

    Raises:
        EOFError: the parent is gone.
    """
    loop, load, stopped = asyncio.get_running_loop(), asyncio.create_task(work), asyncio.Event()

    def stop() -> None:
        loop.remove_reader(pipe.fileno())  # once
        stopped.set()
        load.cancel()

    loop.add_reader(pipe.fileno(), stop)
    try:
        await load
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
        pipe.recv()
        return True
    finally:
        loop.remove_reader(pipe.fileno())
    return False


def _busy_s() -> float:
    """Seconds in which this thread computed, or had to wait for a core; where the system does not tell, the former."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class Run:
    """The requests of one process under way.

    Args:
        sender: the connection.
        start: when the run starts, on the clock of time.monotonic.
        report: told the progress about four times a second.
    """

    def __init__(self, sender: Sender, start: float, report: Callable[[Progress], None]):
        """See the class."""
        self.records = Records()
        self._sender, self._start, self._report = sender, start, report
        self._sent = self._failed = 0
        self._reported = start

    @property
    def under_way(self) -> int:
        """Requests that were sent and have no answer."""
        return self._sent - len(self.records)

    async def open(self, requests: tuple[Request, ...]) -> None:
        """Sends each request when it is due, whatever became of those before it."""
        under_way: set[asyncio.Task[str]] = set()
        try:
            for request in requests:
                await self._until(request.at)
                task = asyncio.create_task(self._one(request, request.at))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                self._tell()
            while under_way:
                await asyncio.wait(under_way, timeout=_REPORT_S)
                self._tell()
        finally:
            ended = tuple(under_way)  # of a load that was cut short; each takes itself out of the set
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

    async def closed(self, job: Job) -> None:
        """Each client sends its next request when the last is answered, until the time is over.

        After a failure it waits for a hundredth of a second.
        """
        turn = 0

        async def client() -> None:
            nonlocal turn
            while (now := time.monotonic() - self._start) < job.seconds:
                request = job.requests[turn % len(job.requests)]
                turn += 1
                status = await self._one(request, now)
                self._tell()
                if status != OK:
                    await asyncio.sleep(_PAUSE_S)

        await self._until(0.0)
        await asyncio.gather(*(client() for _ in range(job.clients)))

    async def _one(self, request: Request, scheduled: float) -> str:
        sent = time.monotonic() - self._start
        self._sent += 1
        tokens, status = await self._sender.send(request)
        self.records.add(request, scheduled, sent, time.monotonic() - self._start, tokens, status)
        self._failed += status != OK
        return status

    async def _until(self, at: float) -> None:
        # Good to a millisecond. Turning in place would be finer, and take the server's cores on a small machine.
        if (left := self._start + at - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._reported >= _REPORT_S:
            self._reported = now
            self._report(Progress(self._sent, len(self.records), self._failed))
