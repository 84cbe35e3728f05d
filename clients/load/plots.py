"""The plots of load runs, as PNG bytes. No pyplot: it keeps global state and looks for a display."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from clients.load.metrics import Series
from clients.load.records import Records

_DPI = 110
_MOST_POINTS = 20_000


def plot_cdf(runs: Mapping[str, Records]) -> bytes:
    """Share of requests that took longer, on logarithmic axes, so that P99 and P99.9 can be read off; a line a run.

    Failed requests count as longer than any.
    """
    figure, axes = _axes("latency from the scheduled time, ms", "share of the requests that took longer")
    for name, records in runs.items():
        latency = np.sort(records.latency_ms()[records.ok()])
        if len(latency):
            axes.plot(latency, longer(len(latency), len(records)), label=name, drawstyle="steps-post")
    for share, label in ((0.5, "P50"), (0.1, "P90"), (0.01, "P99"), (0.001, "P99.9")):
        axes.axhline(share, color="#a0aec0", linewidth=0.6)
        axes.annotate(
            label, (1.0, share), xycoords=("axes fraction", "data"), xytext=(3, -3), textcoords="offset points"
        )
    axes.set_yscale("log")
    axes.set_xscale("log")
    return _png(figure, axes)


def longer(answered: int, requests: int) -> NDArray[np.float64]:
    """float64 [answered]: the share of all requests that took as long as each answered one, by rising latency."""
    share: NDArray[np.float64] = 1 - np.arange(answered) / requests
    return share


def plot_latency(records: Records) -> bytes:
    """Requests' latency over the time they were due, a colour a class, failed ones as crosses.

    Of many thousands only so many are drawn, and all above their class's P99.
    """
    figure, axes = _axes("due at, s", "latency, ms")
    at, latency, ok, kinds = np.asarray(records.scheduled), records.latency_ms(), records.ok(), np.array(records.kind)
    every = max(1, len(records) // _MOST_POINTS)
    for kind in sorted(set(records.kind)):
        chosen = thinned(np.flatnonzero(ok & (kinds == kind)), latency, every)
        axes.scatter(at[chosen], latency[chosen], s=4, alpha=0.5, linewidths=0, label=kind)
    if (~ok).any():
        axes.scatter(at[~ok], latency[~ok], s=16, marker="x", color="#c53030", label="failed")
    axes.set_ylim(bottom=0)
    return _png(figure, axes)


def thinned(places: NDArray[np.int64], latency: NDArray[np.float64], every: int) -> NDArray[np.int64]:
    """Every so many of the places, and those above their P99, in order: a spike must not be left out."""
    if every == 1 or not len(places):
        return places
    slowest = places[latency[places] > np.percentile(latency[places], 99)]
    return np.union1d(places[::every], slowest)


def plot_series(series: Series, label: str, *, idle: bool = False) -> bytes:
    """A line per name over time; names that never rise above 0 are left out, unless `idle`."""
    figure, axes = _axes("s", label)
    for name, values in series.values.items():
        if idle or np.nansum(values) > 0:
            axes.plot(series.at, values, label=name, marker=".", markersize=3, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return _png(figure, axes)


def plot_bars(values: Mapping[str, float], label: str) -> bytes:
    """One bar per name, its value beside it."""
    figure, axes = _axes(label, "", height=0.6 + 0.4 * len(values))
    axes.barh(list(values), list(values.values()), color="#2b6cb0")
    for place, value in enumerate(values.values()):
        axes.annotate(f"{value:.4g}", (value, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return _png(figure, axes)


def _axes(x: str, y: str, height: float = 3.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.5, height), layout="constrained", dpi=_DPI)
    axes: Any = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure, axes: Axes) -> bytes:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
    stream = BytesIO()
    FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})  # equal data, equal bytes
    return stream.getvalue()
