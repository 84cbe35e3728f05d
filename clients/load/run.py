"""A load run: several worker processes that start at the same moment, with their progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from clients.errors import EncoderError, InvalidInput
from clients.load.plan import Plan
from clients.load.records import OK, Records, joined
from clients.load.target import Target
from clients.load.worker import Failed, Job, Message, Ready, Stop, work
from clients.load.worker import Progress as Done

#: From the last process being ready to the first request being due.
_LEAD_S = 0.2
_READY_S = 60.0
_LINE_S = 5.0
#: How often Ctrl-C is looked for while no process says anything.
_LOOK_S = 0.25

Tell = Callable[[float, Done], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a load.

    Attributes:
        records: what had come of the requests by then; `cut_s` says when that was.
    """

    def __init__(self, records: Records):
        """See the class."""
        super().__init__("the load was interrupted")
        self.records = records


@dataclass(frozen=True)
class LoadOptions:
    """How a plan is sent.

    Attributes:
        processes: of the generator, 1 to 64. Each takes a turn of the requests.
        clients: of a closed loop, all processes together; 0 for the open loop.

    Raises:
        InvalidInput: a number is out of its limits, or there are fewer clients than processes.
    """

    processes: int = 2
    clients: int = 0

    def __post_init__(self) -> None:
        """Checks the limits."""
        if not 1 <= self.processes <= 64:
            raise InvalidInput("processes of the generator", value=self.processes, limit="1 to 64")
        if self.clients < 0 or 0 < self.clients < self.processes:
            raise InvalidInput(
                "clients of the closed loop",
                value=self.clients,
                limit=f"0 for the open loop, or at least the {self.processes} processes",
            )


class Crew:
    """The processes of a generator, for any number of loads one after the other, inside a `with` block.

    They are started afresh (spawn): nothing of this process, its threads and locks, is copied.

    Args:
        processes: how many, 1 to 64.

    Raises:
        InvalidInput: the number is out of its limits.
    """

    def __init__(self, processes: int):
        """See the class."""
        LoadOptions(processes)  # checks it
        self.processes = processes
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        """Starts them."""
        spawn = multiprocessing.get_context("spawn")
        try:
            with deaf_to_interrupts():
                for _ in range(self.processes):
                    ours, theirs = spawn.Pipe()
                    process: BaseProcess = spawn.Process(target=work, args=(theirs,), daemon=True, name="load")
                    self._pipes.append(ours)
                    process.start()
                    self._processes.append(process)
                    theirs.close()  # so that the end of the process is the end of the pipe
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends them, whatever they are at; after an error without waiting for it."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join(2)
            if process.is_alive():
                process.terminate()
                process.join()
        self._pipes, self._processes = [], []

    def run(self, target: Target | Sequence[Target], plan: Plan, clients: int = 0, tell: Tell | None = None) -> Records:
        """Sends a plan; see `run_load`."""
        if not plan.requests:
            raise InvalidInput("the plan has no request", limit="at least one", remedy="raise the rate or the time")
        options = LoadOptions(self.processes, clients)
        targets = [target] if isinstance(target, Target) else list(target)
        for number, pipe in enumerate(self._pipes):
            _send(pipe, _job(targets[number % len(targets)], plan, options, number))
        for pipe in self._pipes:
            _expect_ready(pipe)
        with _first_interrupt() as interrupted:
            start = time.monotonic() + _LEAD_S
            for pipe in self._pipes:
                _send(pipe, start)
            records = joined(_collect(self._pipes, start, tell, interrupted))
        records.start = start
        if interrupted.is_set():
            raise Interrupted(records)
        return records


def run_load(target: Target | Sequence[Target], plan: Plan, options: LoadOptions, tell: Tell | None = None) -> Records:
    """Sends a plan and returns what came of each request, in the order they were due.

    The processes start and connect first; none of that is in the times.

    Args:
        target: the server; of several each process has one, by turns.
        plan: the requests. An open loop sends each at its time; a closed loop takes them in turn for `plan.seconds`.
        options: how.
        tell: told the seconds since the start and the progress of all processes, now and then.

    Raises:
        InvalidInput: the plan is empty.
        EncoderError: a process of the generator failed.
        Interrupted: Ctrl-C while the load ran; it holds what had been answered. A second one does not wait for that.
    """
    with Crew(options.processes) as crew:
        return crew.run(target, plan, options.clients, tell)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started in here do not hear Ctrl-C: it is this process's to end them, and they would only complain."""
    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set
        yield
        return
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)


@contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C in here is only noted: raised, it could tear a message of a process that is being read."""
    noted = threading.Event()
    # Where somebody else looks after Ctrl-C, or where handlers cannot be set, nothing is noted.
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _job(target: Target, plan: Plan, options: LoadOptions, number: int) -> Job:
    share = options.clients // options.processes + (number < options.clients % options.processes)
    requests = plan.requests[number :: options.processes]
    if options.clients and not requests:  # fewer texts than processes
        requests = plan.requests
    return Job(target, requests, share, plan.seconds)


def _expect_ready(pipe: Connection) -> None:
    if not pipe.poll(_READY_S):
        raise EncoderError("a process of the load generator did not start", limit=f"{_READY_S:g} s")
    message = _received(pipe)
    if not isinstance(message, Ready):
        raise EncoderError("a process of the load generator sent something unexpected", value=message)


def _send(pipe: Connection, message: Job | float | Stop) -> None:
    try:
        pipe.send(message)
    except OSError:
        raise _ended() from None


def _received(pipe: Connection) -> Message:
    try:
        message: Message = pipe.recv()
    except (EOFError, OSError):  # reset, where it had not read all
        raise _ended() from None
    if isinstance(message, Failed):
        raise EncoderError("a process of the load generator failed", value=message.message)
    return message


def _ended() -> EncoderError:
    return EncoderError(
        "a process of the load generator ended before its time", remedy="see what it wrote to standard error"
    )


def _collect(
    pipes: Sequence[Connection], start: float, tell: Tell | None, interrupted: threading.Event
) -> list[Records]:
    waiting, stopped = list(pipes), False
    progress: dict[int, Done] = {}
    results: list[Records] = []
    while waiting:
        if interrupted.is_set() and not stopped:
            stopped = True
            for pipe in waiting:
                _send(pipe, Stop())
        for ready in wait(waiting, timeout=_LOOK_S):
            pipe = next(pipe for pipe in waiting if pipe is ready)
            message = _received(pipe)
            if isinstance(message, Done):
                progress[id(pipe)] = message
            elif isinstance(message, Records):
                failed = sum(status != OK for status in message.status)
                progress[id(pipe)] = Done(len(message), len(message), failed)
                results.append(message)
                waiting.remove(pipe)
        if tell:
            parts = list(progress.values())
            total = Done(*(sum(part[place] for part in parts) for place in range(3)))
            tell(max(0.0, time.monotonic() - start), total)
    return results


@contextmanager
def shown_progress(label: str, seconds: float, console: Console) -> Iterator[Tell]:
    """A bar on a terminal, a plain line every few seconds elsewhere.

    Args:
        label: what runs.
        seconds: its length by plan.
        console: where to show it.
    """
    if not console.is_terminal:
        said = 0.0

        def line(elapsed: float, done: Done) -> None:
            nonlocal said
            if elapsed - said >= _LINE_S:
                said = elapsed
                console.print(f"{label}: {elapsed:.0f} of {seconds:.0f} s, {_words(done)}", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=seconds, counts="")
        yield lambda elapsed, done: bar.update(task, completed=min(elapsed, seconds), counts=_words(done))


def _words(done: Done) -> str:
    return f"{done.sent} sent, {done.sent - done.done} under way, {done.failed} failed"


def default_processes() -> int:
    """Processes of the generator by default: two, one on a single core."""
    with suppress(AttributeError):
        return min(2, len(os.sched_getaffinity(0)))
    return min(2, os.cpu_count() or 1)
