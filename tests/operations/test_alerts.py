"""Alert and recording rules: promtool's word on them, every alert shown to fire and to stay silent, and its runbook."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.settings import load_settings
from tests.operations.metric_names import NAMES, RECORDED, names_in
from tests.operations.test_image import tool
from tests.tools.repositories import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RUNBOOK = ROOT / "docs" / "runbook.md"


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
CASES = [
    (case, expected)
    for path in sorted((FOLDER / "tests").glob("*.yml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
    for expected in case["alert_rule_test"]
]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool", "prometheus (apt)"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_promtool_accepts_the_rules() -> None:
    run = promtool("check", "rules", FOLDER / "rules.yml", FOLDER / "alerts.yml")
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(ALERTS)} rules found" in run.stdout


def test_every_case_holds() -> None:
    files = sorted((FOLDER / "tests").glob("*.yml"))
    run = promtool("test", "rules", *files)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("SUCCESS") == len(files) > 5


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_is_shown_to_fire_and_to_stay_silent(alert: str) -> None:
    mine = [expected["exp_alerts"] for case, expected in CASES if expected["alertname"] == alert]
    firing = [alerts for alerts in mine if alerts]
    assert firing
    assert len(mine) > len(firing)
    # What people read, with its labels filled in.
    for one in (one for alerts in firing for one in alerts):
        assert one["exp_annotations"]["summary"]
        assert not re.search(r"<|\{\{|error|%!|  | on $| of ,", one["exp_annotations"]["summary"])


def test_a_rule_that_does_not_fire_would_be_found(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.yml"):
        text = path.read_text(encoding="utf-8").replace(
            "encoder_lanes_engine_broken == 1", "encoder_lanes_engine_broken == 2"
        )
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "gpu.yml").write_text((FOLDER / "tests" / "gpu.yml").read_text("utf-8"), "utf-8")
    run = promtool("test", "rules", tmp_path / "tests" / "gpu.yml")
    assert run.returncode != 0
    assert "LanesGpuBroken fires" in run.stdout + run.stderr


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_every_alert_has_a_severity_and_a_section_in_the_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("page", "ticket", "info")
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (ROOT / path) == RUNBOOK
    headings = re.findall(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor == alert.lower()
    assert headings.count(alert) == 1


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    headings = re.findall(r"^### (Lanes\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(ALERTS)


def test_the_runbook_quotes_each_alerts_query_as_it_is() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    for alert, rule in ALERTS.items():
        section = text.split(f"### {alert}\n", 1)[1].split("\n### ", 1)[0]
        (quoted, *_) = re.findall(r"```promql\n(.*?)\n```", section, re.DOTALL)
        assert " ".join(quoted.split()) == " ".join(rule["expr"].split()), alert


def test_the_lines_are_those_of_deploy_yaml() -> None:
    objectives = load_settings(ROOT / "deploy.yaml").objectives
    found = {rule["record"]: rule["expr"] for rule in rules("rules.yml") if "objective" in rule["record"]}
    assert found == {
        "encoder_lanes:objective_p99_seconds": f"vector({objectives.p99_ms / 1000:g})",
        "encoder_lanes:objective_gpu_utilization_ratio": f"vector({objectives.gpu_utilization:g})",
    }


def test_rules_ask_for_nothing_that_nobody_exports() -> None:
    used = {name for rule in (*rules("rules.yml"), *rules("alerts.yml")) for name in names_in(rule["expr"])}
    assert used - NAMES - RECORDED == set()


def test_the_cases_are_made_of_metrics_that_are_exported() -> None:
    series = {name for case, _ in CASES for one in case["input_series"] for name in names_in(one["series"])}
    assert series - NAMES == set()
    assert len(series) > 20


def test_every_graph_that_the_runbook_names_is_on_the_dashboard() -> None:
    document = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "encoder-lanes.json").read_text("utf-8"))
    titles = [one["title"] for row in document["panels"] for one in (row, *row.get("panels", []))]
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", RUNBOOK.read_text(encoding="utf-8")))
    missing = {name for name in named if not any(title.startswith(name) for title in titles)}
    assert missing == {"Encoder lanes", "Status, Targets"}
    assert len(named) > 20
