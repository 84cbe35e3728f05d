"""An open loop over minutes, from a process of its own, whose records come while it goes on."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from clients.errors import EncoderError
from clients.load.plan import Plan
from clients.load.records import Records, joined
from clients.load.target import Target, connected
from clients.load.worker import Run

_READY_S = 60.0
#: From the process being ready to the first request being due.
_LEAD_S = 0.2


class SteadyLoad:
    """Sends a trace over and over inside a `with` block, each request when it is due.

    `clients.load.run_load` hands over its records at the end; here they come about four times a second.

    Args:
        target: the server.
        trace: one turn: its requests, and its length in seconds.
        turns: how often it is sent, one turn right after the other.

    Attributes:
        start: when the first turn begins, on the clock of time.monotonic.
    """

    def __init__(self, target: Target, trace: Plan, turns: int):
        """See the class."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = spawn.Pipe()
        arguments = (self._theirs, target, trace, turns)
        self._process = spawn.Process(target=_send, args=arguments, daemon=True, name="steady load")
        self._over = False
        self.start = 0.0

    def __enter__(self) -> Self:
        """Begins.

        Raises:
            EncoderError: the process does not get ready.
        """
        self._process.start()
        self._theirs.close()  # so that the end of the process is the end of the pipe
        if not self._pipe.poll(_READY_S):
            raise EncoderError("the process of the load did not start", limit=f"{_READY_S:g} s")
        self._received()
        self.start = time.monotonic() + _LEAD_S
        self._pipe.send(self.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it, whatever it is at."""
        self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def until(self, at: float) -> Records:
        """Waits until `at` seconds after the start; returns what has ended since the last call.

        Raises:
            EncoderError: the process of the load ended before its time.
        """
        parts = []
        while (left := self.start + at - time.monotonic()) > 0:
            if self._over:
                time.sleep(left)
            # Read at once: a full pipe would hold up the load.
            elif self._pipe.poll(left):
                parts += self._part()
        return joined(parts)

    def rest(self) -> Records:
        """Waits until every request has ended; returns what has since the last call.

        Raises:
            EncoderError: as `until`.
        """
        parts = []
        while not self._over:
            parts += self._part()
        return joined(parts)

    def _part(self) -> list[Records]:
        message = self._received()
        self._over = message is None
        return [] if message is None else [message]

    def _received(self) -> Records | None:
        try:
            message: Records | None = self._pipe.recv()
        except EOFError:
            raise EncoderError(
                "the process of the load ended before its time", remedy="see what it wrote to standard error"
            ) from None
        return message


def _send(pipe: Connection, target: Target, trace: Plan, turns: int) -> None:
    """Body of the process."""
    try:
        asyncio.run(_turns(pipe, target, trace, turns))
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the parent has closed the pipe or is gone
    finally:
        pipe.close()


async def _turns(pipe: Connection, target: Target, trace: Plan, turns: int) -> None:
    requests = tuple(
        replace(request, at=request.at + turn * trace.seconds) for turn in range(turns) for request in trace.requests
    )
    async with connected(target) as sender:
        pipe.send(None)
        start = float(await asyncio.to_thread(pipe.recv))
        # Collections of what stays for good would make requests late.
        gc.collect()
        gc.freeze()

        def tell(_: object) -> None:
            pipe.send(run.records)
            run.records = Records()

        run = Run(sender, start, tell)
        await run.open(requests)
        pipe.send(run.records)
        pipe.send(None)
