"""The plots of a build report, as SVG text. No pyplot: it keeps global state and looks for a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from builders.verify.parity import ParityReport

_WIDTH = 8.0
_ROW = 0.3
_BLUE, _RED, _GREY = "#2b6cb0", "#c53030", "#a0aec0"
# svg.hashsalt: equal data must give equal bytes. svg.fonttype none keeps the text selectable and small.
_STYLE: Any = {"svg.hashsalt": "builders", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
#: Below it FP32 itself has no digits, and a logarithm needs a floor.
_FLOOR = 1e-9


def plot_parity(report: ParityReport) -> str:
    """1 - cosine of each block on a logarithmic axis, the line across it, failing blocks red, "not finite" in words."""
    names = [block.name for block in report.blocks]
    values = [max(1 - block.cosine, _FLOOR) for block in report.blocks]
    colours = [_BLUE if block.passed else _RED for block in report.blocks]
    figure, axes = _axes(len(names))
    axes.barh(range(len(names)), values, color=colours, left=_FLOOR / 10)
    axes.set_xscale("log")
    axes.axvline(max(1 - report.line.cosine, _FLOOR), color=_RED, linestyle="--", linewidth=1)
    for place, block in enumerate(report.blocks):
        label = block.found if block.score_error is not None or not block.finite else f"{block.cosine:.6f}"
        axes.annotate(label, (values[place], place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xlim(_FLOOR / 2, max(10 * max(values, default=1.0), 1e-2))
    return _finish(figure, axes, names, f"1 - worst cosine to FP32 (dashed: line {report.line.cosine})")


def plot_bars(values: Mapping[str, float], unit: str) -> str:
    """One bar per name, its value written beside it."""
    figure, axes = _axes(len(values))
    axes.barh(range(len(values)), list(values.values()), color=_BLUE)
    for place, value in enumerate(values.values()):
        axes.annotate(f"{value:.4g}", (value, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)
    return _finish(figure, axes, list(values), unit)


def plot_pairs(names: Sequence[str], before: Sequence[float], after: Sequence[float], unit: str) -> str:
    """Two bars per name: before (grey) and after (blue)."""
    figure, axes = _axes(len(names), row=0.5)
    places = range(len(names))
    axes.barh([place - 0.2 for place in places], before, height=0.38, color=_GREY, label="before")
    axes.barh([place + 0.2 for place in places], after, height=0.38, color=_BLUE, label="after")
    for values, shift in ((before, -0.2), (after, 0.2)):
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:.4g}",
                (value, place + shift),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    axes.margins(x=0.12)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _finish(figure, axes, list(names), unit)


def _axes(rows: int, row: float = _ROW) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, 0.9 + row * max(rows, 1)), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, names: Sequence[str], unit: str) -> str:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    text = StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    # The XML prologue and DOCTYPE have no place inside an HTML page.
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
