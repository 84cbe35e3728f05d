"""One graph of the dashboard and its queries, and the pieces of PromQL that many of them share."""

from __future__ import annotations

from dataclasses import dataclass

#: Label matchers of the dashboard's variables.
AT = 'instance=~"$instance"'
OF = f'{AT}, model=~"$model"'
#: A lane's model ends in a number, an entry's does not.
LANES = f'{AT}, model=~".*_[0-9]+"'
BUCKET = "bucket {{bucket}}"


@dataclass(frozen=True)
class Query:
    """A query of Prometheus and the name of its series.

    Attributes:
        text: PromQL; `$instance`, `$model` and `$__rate_interval` are Grafana's.
        legend: with labels in double braces.
        is_line: drawn as a dashed red line, for an objective.
    """

    text: str
    legend: str
    is_line: bool = False


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        title: what is shown.
        about: what it means and where to go on; appears at the i in the panel's corner.
        unit: Grafana's name of a unit.
        queries: what is drawn.
        width: of 24.
        top: highest value of the axis, where it is known.
        stacked: series add up.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    top: float | None = None
    stacked: bool = False


def rate(name: str, by: str, matchers: str = OF) -> str:
    """A counter's rise per second, added up by some of its labels."""
    return f"sum by ({by}) (rate({name}{{{matchers}}}[$__rate_interval]))"


def ratio(above: str, below: str) -> str:
    """A quotient that has no value, instead of a wrong one, where nothing happened."""
    return f"{above} / ({below} > 0)"


def summary(name: str, quantile: str, matchers: str) -> str:
    """A quantile of one of Triton's summaries, which are in microseconds, as seconds."""
    return f'{name}{{quantile="{quantile}", {matchers}}} / 1e6'
