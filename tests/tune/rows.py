"""Measurements of known figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from builders.bench.result import Row
from builders.tune.axis import Setting
from builders.tune.trial import Trial


def row(loop: Any, number: int, throughput: float, p50: float, p99: float, failed: int = 0, valid: bool = True) -> Row:
    """A row whose latencies have about these percentiles; rounds differ by a hundredth or so."""
    chance = np.random.default_rng([number, round(throughput * 7), round(p99 * 3)])
    noise = float(np.exp(chance.normal(0, 0.01)))
    width = np.log(p99 / p50) / 2.33
    latencies = tuple(float(value) for value in p50 * noise * np.exp(chance.normal(0, width, 500)))
    return Row(
        driver="any", round=number, loop=loop, throughput=throughput * noise, failed=failed, valid=valid,
        cpu_share=0.5, gpu=None, latencies=latencies, kinds=("all",) * 500, tokens=(20,) * 500,
    )  # fmt: skip


def trial(
    throughput: float,
    p50: float,
    p99: float,
    rounds: int = 3,
    label: str = "a",
    overrides: Mapping[str, Any] | None = None,
) -> Trial:
    closed = [row("closed", number, throughput, p50, p99) for number in range(rounds)]
    opened = [row("open", number, throughput, p50, p99) for number in range(rounds)]
    return Trial(Setting(label, overrides or {}), closed, opened)
