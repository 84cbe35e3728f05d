"""The timeline of a profile as a picture: what the entry's processes and the lanes did, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from builders.profile.path import Span

_COLOURS = {
    "decode": "#9467bd", "tokenise": "#ff7f0e", "group": "#8c564b", "lanes": "#dddddd", "respond": "#7f7f7f",
    "copy": "#17becf", "execute": "#2ca02c",
}  # fmt: skip


def draw_timeline(spans: Sequence[Span], path: Path, *, seconds: float = 0.5) -> Path:
    """Draw `seconds` of the middle of a profile as PNG: a row for each process, a bar for each span.

    Args:
        spans: of all processes, not empty.
        path: file to write.
        seconds: how much of the time is shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    begin = max(first, (first + last - seconds) / 2)
    end = min(last, begin + seconds)
    shown = [span for span in spans if span.end > begin and span.begin < end]
    rows = sorted({(span.model, span.process) for span in shown}, key=_order)
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.4 * len(rows)))
    for name, colour in _COLOURS.items():
        for place, row in enumerate(rows):
            own = [span for span in shown if (span.model, span.process) == row and span.name == name]
            bars = [((span.begin - begin) * 1000, (span.end - span.begin) * 1000) for span in own]
            if bars:
                axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour)
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.set_yticks(range(len(rows)), [f"{model} ({process})" for model, process in rows])
    axes.set_xlim(0, (end - begin) * 1000)
    axes.set_xlabel("milliseconds")
    axes.invert_yaxis()
    axes.legend(ncols=len(_COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return path


def _order(row: tuple[str, int]) -> tuple[int, str, int]:
    """The entry first, then the lanes by length."""
    model, process = row
    length = model.removeprefix("encoder_")
    return int(length) if length.isdigit() else 0, model, process
