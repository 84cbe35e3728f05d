"""Writes dashboards/encoder-lanes.json, which Grafana is provisioned with.

    python3 deploy/grafana/dashboard.py            # writes the file
    python3 deploy/grafana/dashboard.py --check    # exit code 1 when the file is not what this would write

What is shown stands in panels.py and machine_panels.py. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from panel import Panel
from panels import ROWS

FILE = Path(__file__).resolve().parent / "dashboards" / "encoder-lanes.json"
#: Grafana's grid is this wide.
WIDTH = 24
HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana's JSON model has it."""
    panels: list[dict[str, Any]] = []
    number, y = 0, 0
    for title, row, folded in ROWS:
        number += 1
        header: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": folded,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        panels.append(header)
        y, x = y + 1, 0
        for panel in row:
            number += 1
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            (header["panels"] if folded else panels).append(_graph(number, panel, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": "encoder-lanes",
        "title": "Encoder lanes",
        "description": "Made by deploy/grafana/dashboard.py. What to do about an alert: docs/runbook.md.",
        "tags": ["encoder-lanes"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_alerts_shown()]},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("instance", "Server", 'label_values(up{job="triton"}, instance)'),
                _variable("model", "Model", "label_values(encoder_lanes_entry_batches_total, model)"),
            ]
        },
        "panels": panels,
    }


def _graph(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.top is not None:
        defaults["max"] = panel.top
    letters = [chr(ord("A") + position) for position in range(len(panel.queries))]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "targets": [
            {"refId": letter, "datasource": _SOURCE, "expr": query.text, "legendFormat": query.legend, "range": True}
            for letter, query in zip(letters, panel.queries, strict=True)
        ],
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [
                _drawn_as_line(letter) for letter, query in zip(letters, panel.queries, strict=True) if query.is_line
            ],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _drawn_as_line(letter: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byFrameRefID", "options": letter},
        "properties": [
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
            {"id": "custom.fillOpacity", "value": 0},
            {"id": "custom.stacking", "value": {"mode": "none", "group": "line"}},
        ],
    }


def _alerts_shown() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "enable": True,
        "iconColor": "red",
        "datasource": _SOURCE,
        "expr": 'ALERTS{alertname=~"Lanes.*", alertstate="firing", severity=~"page|ticket"}',
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description="Write Grafana's dashboard of the encoder lanes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the file is out of date")
    if parser.parse_args().check:
        if FILE.read_text(encoding="utf-8") == text():
            return 0
        print(f"{FILE} is not what dashboard.py writes: run python3 deploy/grafana/dashboard.py", file=sys.stderr)
        return 1
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
