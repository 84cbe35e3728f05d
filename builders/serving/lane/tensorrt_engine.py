"""The GPU engine: one plan, one profile, one arena, two pinned slots and a CUDA graph per batch step.

Everything the GPU needs is taken before the lane is ready; a batch is then one copy up, one graph, one copy down, in
one stream. While batch k runs, batch k + 1 is written into the other slot and its work is already in the stream.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Arena, aligned
from .cuda import Cuda, CudaError
from .errors import EngineBrokenError, EngineError
from .graphs import Graphs
from .plan import Plan, describe
from .staging import Arrays, Layout, Slot

TECHNIQUES = ("arena", "pinned", "graphs", "overlap")
"""What can be switched off to see what it gains; each needs those before it."""


@dataclass(frozen=True)
class TensorRTOptions:
    """The engine's own settings, as render wrote them.

    Attributes:
        profile: number of the bucket's profile in the plan.
        device: number of the GPU.
        arena_factor: the arena is this many times the reported need.
        techniques: those of `TECHNIQUES` that are on.
        timeout_s: a batch that takes longer breaks the engine, seconds.
        native_allocations: count TensorRT's own allocations, too.
    """

    profile: int = 0
    device: int = 0
    arena_factor: float = 1.2
    techniques: tuple[str, ...] = TECHNIQUES
    timeout_s: float = 30.0
    native_allocations: bool = True

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> TensorRTOptions:
        """From the parameter's mapping.

        Raises:
            TypeError: it was not rendered by this version of the project.
            ValueError: techniques that cannot be on together.
        """
        made = cls(**{**options, "techniques": tuple(options.get("techniques", TECHNIQUES))})
        if made.techniques != TECHNIQUES[: len(made.techniques)]:
            raise ValueError(
                f"engine.techniques {list(made.techniques)}: each needs those before it; limit: the first ones of "
                f"{list(TECHNIQUES)}; render the configuration again"
            )
        return made


@dataclass
class Counts:
    """What the lane tells as metrics; all since the start."""

    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    copies: int = 0
    failed: int = 0
    staging_s: float = 0.0
    """Time in which the host wrote batches into slots and launched them, seconds."""


@dataclass
class Pending:
    """A batch that is under way; `TensorRTEngine.collect` gives its rows."""

    slot: Slot
    step: int
    rows: int
    done: Any
    begin: float = 0.0
    """When its slot was free, seconds of CLOCK_MONOTONIC."""
    launched: float = 0.0
    """When all its work was in the stream."""
    own: list[int] = field(default_factory=list)
    """Device memory of this batch alone, where there is no arena."""
    addresses: dict[str, int] = field(default_factory=dict)


class TensorRTEngine:
    """An `Engine` on one GPU, of one bucket.

    `run` computes a batch; `submit` and `collect` do it in two halves, so that the next batch can be submitted in
    between. Batches finish in the order in which they were submitted. `submit` is for one thread at a time, `collect`
    for one thread at a time; the two may differ.

    Args:
        path: model.plan.
        length: the bucket, tokens.
        steps: batch sizes that a batch is padded up to, rising; the last one is the largest batch.
        output: name of the output that is answered.
        options: the engine's own settings.
        cuda, tensorrt: in place of the installed ones.

    Raises:
        EngineError: the plan, the GPU or its memory do not allow it; the message has the numbers.
    """

    def __init__(
        self,
        path: Path,
        *,
        length: int,
        steps: Sequence[int],
        output: str,
        options: TensorRTOptions,
        cuda: Cuda | None = None,
        tensorrt: Any = None,
    ):
        """See the class."""
        self._options, self._output = options, output
        self.broken: str | None = None
        """Why nothing can be computed any more; None while it can."""
        self.counts = Counts()
        try:
            self._cuda = cuda or Cuda(options.device)
            self._plan = Plan(
                path, self._cuda, profile=options.profile, length=length, module=tensorrt,
                native_allocations=options.native_allocations,
            )  # fmt: skip
            self._check(steps)
            self._steps = tuple(steps)
            self._inputs = {step: Layout(self._plan.inputs, step) for step in steps}
            self._outputs = {step: Layout(self._plan.outputs, step) for step in steps}
            self.need = self._need()
            """Device memory that a batch needs: activations, inputs, outputs; bytes."""
            self._make_memory()
            self._graphs = Graphs(self._cuda)
            if "graphs" in options.techniques:
                self._graphs.capture(self._steps, self._run_bound)
        except CudaError as error:
            raise EngineError(
                f"{path.parent.parent.name}: {error}; to do: look at nvidia-smi and its driver"
            ) from error

    def _check(self, steps: Sequence[int]) -> None:
        outputs = [spec.name for spec in self._plan.outputs]
        if self._output not in outputs:
            raise EngineError(f"{self._plan.name} has no output {self._output}; limit: {', '.join(outputs)}")
        if not steps or steps[-1] > self._plan.batch:
            raise EngineError(
                f"{self._plan.name} is built for {self._plan.batch} texts at once; the batch steps are {list(steps)}; "
                "to do: render again, with the settings that the engines were built with"
            )

    def _need(self) -> int:
        inputs = max(layout.bytes for layout in self._inputs.values())
        outputs = max(layout.bytes for layout in self._outputs.values())
        return aligned(self._plan.activation_bytes) + aligned(inputs) + aligned(outputs)

    def _make_memory(self) -> None:
        # One packed copy each way, from and to pinned memory, at places that never move.
        self._merged = "pinned" in self._options.techniques
        sizes = [max(layout.bytes for layout in side.values()) for side in (self._inputs, self._outputs)]
        make = self._cuda.pinned if self._merged else lambda size: np.zeros(size, np.uint8)
        self._slots = [
            Slot(number, self._inputs, self._outputs, (make(sizes[0]), make(sizes[1]))) for number in range(2)
        ]
        self._events = [self._cuda.event() for _ in self._slots]
        self._free = threading.Semaphore(len(self._slots))
        self._next = 0
        self.arena = Arena(self._cuda, self.need, self._options.arena_factor, self._plan.name)
        activations = aligned(self._plan.activation_bytes)
        self._plan.give_memory(self.arena.take(activations), activations)
        self._places: tuple[int, int] | None = None
        if "arena" in self._options.techniques:
            self._places = self.arena.take(sizes[0]), self.arena.take(sizes[1])

    # ── a batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, inputs: Mapping[str, NDArray[np.int32]]) -> NDArray[np.float32]:
        """See `Engine.run`."""
        return self.collect(self.submit([inputs]))

    def submit(self, parts: Sequence[Arrays]) -> Pending:
        """Write the parts of one batch into a free slot and start it; waits while both slots are under way.

        Args:
            parts: by request: tensor name to array [rows, ...], the plan's inputs.

        Raises:
            EngineBrokenError: nothing can be computed any more.
            EngineError: this batch cannot; the engine is as it was.
        """
        rows = sum(len(part["input_ids"]) for part in parts)
        step = self._step_of(rows, parts)
        self._take_slot()
        begin = time.monotonic()
        pending = Pending(self._slots[self._next], step, rows, self._events[self._next], begin)
        try:
            self._cuda.enter()
            pending.slot.fill(step, parts)
            self._start(pending)
        except BaseException as error:
            self._drop(pending, error)
            raise self._failure(error) from error
        self._next = (self._next + 1) % len(self._slots)
        pending.launched = time.monotonic()
        self.counts.staging_s += pending.launched - begin
        return pending

    def collect(self, pending: Pending) -> NDArray[np.float32]:
        """Wait for a batch and give its rows, FP32 [rows, ...].

        Raises:
            EngineError: it failed; EngineBrokenError when nothing can be computed any more.
        """
        outputs = pending.slot.outputs(pending.step)
        try:
            self._cuda.enter()
            self._cuda.wait_for(pending.done, self._options.timeout_s)
            if not self._merged:
                for name, array in outputs.items():
                    self._cuda.download_now(pending.addresses[name], array)
                    self.counts.copies += 1
            # A copy: the slot belongs to the next batch from here on.
            rows = np.array(outputs[self._output][: pending.rows], np.float32)
        except BaseException as error:
            self._drop(pending, error)
            raise self._failure(error) from error
        self._give_back(pending)
        self.counts.batches += 1
        self.counts.rows += pending.rows
        self.counts.padded_rows += pending.step - pending.rows
        return rows

    def _step_of(self, rows: int, parts: Sequence[Arrays]) -> int:
        place = bisect_left(self._steps, rows)
        if rows < 1 or place == len(self._steps):
            raise EngineError(f"{self._plan.name}: a batch of {rows} rows; limit: 1 to {self._steps[-1]}")
        for spec in self._plan.inputs:
            for part in parts:
                array = part.get(spec.name)
                if array is None or array.shape != (len(part["input_ids"]), *spec.row):
                    raise EngineError(
                        f"{self._plan.name}: {spec.name} is {None if array is None else list(array.shape)}; limit: "
                        f"[b, …] of {describe(self._plan.inputs)}"
                    )
        return self._steps[place]

    def _start(self, pending: Pending) -> None:
        """Copy up, run, copy down, note the end; all in the stream."""
        step, cuda = pending.step, self._cuda
        inputs, outputs = self._inputs[step], self._outputs[step]
        if self._places is None:
            for layout in (inputs, outputs):
                for name, spec in layout.specs.items():
                    pending.own.append(cuda.allocate(spec.bytes(step)))
                    pending.addresses[name] = pending.own[-1]
        else:
            pending.addresses = self._addresses(step)
        if self._merged and self._places is not None:
            cuda.upload(self._places[0], pending.slot.source[: inputs.bytes])
            self.counts.copies += 2
        else:
            for name, array in pending.slot.inputs(step).items():
                cuda.upload_now(pending.addresses[name], array)
                self.counts.copies += 1
        if not self._graphs.launch(step):
            self._plan.bind(step, pending.addresses)
            self._plan.enqueue()
        if self._merged and self._places is not None:
            cuda.download(self._places[1], pending.slot.result[: outputs.bytes])
        cuda.record(pending.done)

    def _addresses(self, step: int) -> dict[str, int]:
        assert self._places is not None  # noqa: S101 - graphs and pinned copies need the arena
        return {
            name: place + offset
            for place, layout in zip(self._places, (self._inputs[step], self._outputs[step]), strict=True)
            for name, offset in layout.offsets.items()
        }

    def _run_bound(self, step: int) -> None:
        self._plan.bind(step, self._addresses(step))
        self._plan.enqueue()

    # ── slots and failures ───────────────────────────────────────────────────────────────────────────────────────

    def _take_slot(self) -> None:
        if not self._free.acquire(timeout=self._options.timeout_s * 2):
            self._break("no slot became free; the GPU or the lane's own thread hangs")
        if self.broken is not None:
            self._free.release()
            raise EngineBrokenError(self._broken_message())

    def _give_back(self, pending: Pending) -> None:
        for address in pending.own:
            self._cuda.free(address)
        pending.own.clear()
        self._free.release()

    def _drop(self, pending: Pending, error: BaseException) -> None:
        """After a failure: is the context alive, and is the stream past what was put in for this batch?"""
        self.counts.failed += 1
        if isinstance(error, CudaError) and error.fatal:
            self._break(str(error))
        elif self.broken is None:
            try:
                self._cuda.record(pending.done)
                self._cuda.wait_for(pending.done, self._options.timeout_s)
            except CudaError as after:
                self._break(f"{error}; then {after}")
        if self.broken is None:
            self._give_back(pending)
        else:
            self._free.release()  # whoever waits is told that it is broken

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason

    def _broken_message(self) -> str:
        return (
            f"{self._plan.name} is not ready: its GPU context is broken ({self.broken}); to do: touch a file of the "
            "model and load it again, or restart the server"
        )

    def _failure(self, error: BaseException) -> BaseException:
        if self.broken is not None:
            return EngineBrokenError(self._broken_message())
        if isinstance(error, EngineError):
            return error
        if isinstance(error, CudaError):
            return EngineError(f"{self._plan.name}: {error}; this batch failed, the lane goes on")
        return error

    # ── what the lane asks ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def overlaps(self) -> bool:
        """Whether the next batch may be submitted before the last one is collected."""
        return "overlap" in self._options.techniques

    def seal(self) -> None:
        """The lane is ready: allocations count as late from now on, batches from zero."""
        self.counts = Counts()
        self._graphs.hits = self._graphs.misses = 0
        self._cuda.seal()

    def metrics(self) -> dict[str, float]:
        """Values by name; what ends in `_total` only rises."""
        counts = self.counts
        return {
            "arena_bytes": self.arena.bytes,
            "arena_peak_bytes": self.arena.peak,
            "device_bytes": self._cuda.allocated_bytes,
            "late_allocations_total": self._cuda.late_allocations,
            "graph_hits_total": self._graphs.hits,
            "graph_misses_total": self._graphs.misses,
            "copies_total": counts.copies,
            "batches_total": counts.batches,
            "rows_total": counts.rows,
            "padded_rows_total": counts.padded_rows,
            "failed_batches_total": counts.failed,
            "staging_seconds_total": counts.staging_s,
            "broken": float(self.broken is not None),
        }

    def close(self) -> None:
        """Give everything back; of a broken context nothing can be given back, it goes with the process."""
        if self.broken is not None:
            return
        self._cuda.enter()
        self._cuda.wait()
        self._graphs.close()
        self._plan.close()
        self.arena.close()
        self._cuda.close()
