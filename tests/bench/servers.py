"""Servers and measurements of known figures for the tests of the bench."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
import numpy as np

from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.result import BenchResult, Row
from clients.load.target import Target
from tests.load.servers import Timed, timed_server


class FakeDriver:
    """A server in this process whose answers take `seconds`.

    Args:
        name: of it.
        seconds: as above.
        log: told when it is started and stopped.
        broken: it does not start.
        answers: how many requests it answers; those after them fail.
    """

    def __init__(
        self,
        name: str,
        seconds: float = 0.0,
        log: list[str] | None = None,
        broken: bool = False,
        answers: float = math.inf,
    ):
        self.name, self.about, self.gpus = name, f"answers after {seconds} s", 0
        self.seconds, self.log, self.broken = seconds, log if log is not None else [], broken
        self.answers = answers
        self.seen: Timed | None = None
        self._context: AbstractContextManager[Timed] | None = None

    @property
    def metrics_url(self) -> None:
        return None

    @property
    def pid(self) -> int | None:
        return os.getpid() if self._context else None

    def start(self) -> Target:
        self.log.append(f"start {self.name}")
        if self.broken:
            raise BenchError("it does not start")
        failure = (grpc.StatusCode.INTERNAL, "no more answers")
        self._context = timed_server(
            delay=lambda at: self.seconds, fail=lambda number: failure if number >= self.answers else None
        )
        self.seen = self._context.__enter__()
        return Target(self.seen.url)

    def ended(self) -> None:
        return None

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


def result(
    *,
    rounds: int = 3,
    slower: float = 1.0,
    seed: int = 0,
    speed: float = 1000.0,
    load: LoadSpec | None = None,
    change: Callable[[Row], Row] = lambda row: row,
    **machine: Any,
) -> BenchResult:
    """A stored bench of "product": latencies with runs of slow moments, a tenth of noise between rounds."""
    chance = np.random.default_rng(seed)
    rows = []
    for number in range(rounds):
        of_round = slower * np.exp(chance.normal(0, 0.02))
        moments = np.repeat(np.exp(chance.normal(0, 0.3, 30)), 20)
        latencies = tuple(float(value) for value in 40 * of_round * moments * np.exp(chance.normal(0, 0.2, 600)))
        throughput = float(100 / of_round * np.exp(chance.normal(0, 0.01)))
        common: dict[str, Any] = {"driver": "product", "round": number, "failed": 0, "valid": True, "cpu_share": 0.5}
        common["cpu_ms"] = 1000 / throughput  # of two cores half of the time
        kinds, tokens = ("interactive", "background") * 300, (20, 200) * 300
        rows.append(
            Row(
                **common,
                loop="closed",
                throughput=throughput,
                gpu=None,
                latencies=latencies,
                kinds=kinds,
                tokens=tokens,
            )
        )
        rows.append(
            Row(**common, loop="open", throughput=40.0, gpu=None, latencies=latencies, kinds=kinds, tokens=tokens)
        )
    return BenchResult(
        format=2,
        date="2026-01-01T00:00:00+00:00",
        machine={"processor": "test", "cores": "2", **machine},
        config="deploy.cpu.yaml",
        load=load or LoadSpec(rounds=rounds),
        drivers={"product": "a server"},
        rows=tuple(change(row) for row in rows),
        speeds=(speed,) * rounds,
    )
