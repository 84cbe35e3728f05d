"""What Triton itself counted for each model: waiting, computing, batch sizes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builders.errors import ServerError

PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class ModelStatistics:
    """One model between two looks.

    Attributes:
        requests: answered.
        executions: batches.
        texts: computed; with `executions` the average batch.
        phase_ms: of a request, by Triton's phase, milliseconds.
        failed: requests that failed.
    """

    requests: int
    executions: int
    texts: int
    phase_ms: Mapping[str, float]
    failed: int

    @property
    def batch(self) -> float:
        """Texts of a batch on average."""
        return self.texts / self.executions if self.executions else 0.0


def read_statistics(http_url: str, models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The raw counters of each model's served version; take two and give them to `difference`.

    Args:
        http_url: `http://host:port`.
        models: their names.

    Raises:
        ServerError: the server does not answer, or does not know a model.
    """
    found = {}
    for model in models:
        url = f"{http_url}/v2/models/{model}/stats"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - the server that the caller named
                rows = json.load(reply)["model_stats"]
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            raise ServerError(
                f"the statistics of {model} cannot be read: {error}",
                value=url,
                remedy="name the HTTP address of a running server",
            ) from error
        # Of several loaded versions, the one that works.
        found[model] = max(rows, key=lambda row: int(row.get("inference_count", 0)))
    return found


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, ModelStatistics]:
    """What happened between two looks, by model."""
    found = {}
    for model, late in after.items():
        early = before.get(model, {})

        def grown(*path: str, late: Any = late, early: Any = early) -> int:
            return _number(late, path) - _number(early, path)

        count = grown("inference_stats", "success", "count")
        phases = {name: grown("inference_stats", name, "ns") / max(1, count) / 1e6 for name in PHASES}
        found[model] = ModelStatistics(
            requests=count,
            executions=grown("execution_count"),
            texts=grown("inference_count"),
            phase_ms=phases,
            failed=grown("inference_stats", "fail", "count"),
        )
    return found


def _number(row: Any, path: Sequence[str]) -> int:
    for name in path:
        row = row.get(name, {}) if isinstance(row, dict) else {}
    return int(row or 0)
