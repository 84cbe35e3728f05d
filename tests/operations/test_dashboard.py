"""Grafana's files: the dashboard against Grafana's schema and the code's metric names, and where Grafana finds both.

Grafana itself is not run; test_monitoring.py runs every query.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from builders.triton_wheel import locate_triton
from tests.operations.container import compose
from tests.operations.grafana_schema import problems
from tests.operations.metric_names import NAMES, RECORDED, names_in
from tests.tools.repositories import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
DOCUMENT: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "encoder-lanes.json").read_text(encoding="utf-8"))


def panels(document: dict[str, Any] = DOCUMENT) -> Iterator[dict[str, Any]]:
    """All graphs, those of folded rows too."""
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries() -> list[tuple[str, str]]:
    """Title of the panel and text of every query."""
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def test_the_file_is_what_its_generator_writes() -> None:
    command = [sys.executable, str(GRAFANA / "dashboard.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_dashboard_fits_grafanas_schema() -> None:
    assert problems(DOCUMENT) == []


@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        ((), "titel", "x", "dashboard.titel: unknown to Grafana"),
        ((), "editable", "yes", "dashboard.editable: 'yes'"),
        (("panels", 1), "gridpos", {}, "dashboard.panels[1].gridpos: unknown"),
        (("panels", 1, "gridPos"), "w", "12", "dashboard.panels[1].grid_pos.w: '12'"),
        (("panels", 1, "targets", 0), "expression", "x", "targets[0].expression: unknown"),
        (("panels", 1, "options", "legend"), "placement", "left", "legend.placement: 'left'"),
        (("panels", 1, "fieldConfig", "defaults", "custom"), "showPoints", 3, "show_points: 3"),
        (("templating", "list", 1), "refresh", 7, "refresh: 7"),
    ],
)
def test_the_schema_check_is_one_that_finds_things(where: tuple[Any, ...], key: str, value: Any, said: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    place: Any = document
    for step in where:
        place = place[step]
    place[key] = value
    assert any(said in problem for problem in problems(document)), problems(document)


def test_service_objectives_come_first() -> None:
    first, *shown = DOCUMENT["panels"]
    assert first["title"] == "Service objectives"
    titles = [panel["title"] for panel in shown[:3]]
    assert [title.split()[0] for title in titles] == ["P99", "GPU", "Errors"]
    assert "encoder_lanes:objective_p99_seconds" in [target["expr"] for target in shown[0]["targets"]]


def test_ids_are_unique_and_no_graph_lies_on_another() -> None:
    everything = [*DOCUMENT["panels"], *(one for row in DOCUMENT["panels"] for one in row.get("panels", []))]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for group in [DOCUMENT["panels"], *(row.get("panels", []) for row in DOCUMENT["panels"])]:
        cells: set[tuple[int, int]] = set()
        for panel in group:
            at = panel["gridPos"]
            own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not own & cells, panel["title"]
            cells |= own


def test_every_name_in_a_query_is_one_that_something_exports() -> None:
    used = {name for _, text in queries() for name in names_in(text)}
    assert used - NAMES - RECORDED == set()
    # Names that this machine has no GPU to show are in the server's library; as code, in pieces of 16 characters.
    library = b"".join(path.read_bytes() for path in locate_triton().library_folder.glob("libtritonserver*"))
    for name in used:
        if name.startswith("nv_gpu_"):
            assert name.encode()[:16] in library, name


def test_nearly_every_metric_of_the_project_is_shown() -> None:
    """In a panel, or in a rule that a panel shows; a metric that nobody sees is one that nobody needs."""
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    seen = {name for _, text in queries() for name in names_in(text)} | names_in(rules)
    own = {name for name in NAMES if name.startswith(("encoder_lanes_", "door_"))}
    unseen = {name for name in own - seen if not re.search(r"_(bucket|count|sum|created)$", name)}
    assert unseen <= {"door_texts_total", "encoder_lanes_requests_total"}


def test_wake_ups_are_taken_off_wherever_rejects_are_shown() -> None:
    for title, text in queries():
        assert "REJECTED" not in text, title
    assert any("encoder_lanes:rejects:rate1m" in text for _, text in queries())


def test_grafana_is_provisioned_with_what_compose_mounts() -> None:
    service = compose()["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(compose()["services"]["prometheus"]["networks"]) & set(service["networks"])
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "lanes.yml").read_text())["providers"]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"]
