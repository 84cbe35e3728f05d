"""`python -m clients bench` as people run it, against a server in this process."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from clients.cli import app
from clients.load.metrics import Reading
from clients.load.null_server import null_server
from clients.load.page import Grid, Page, PageSection, render
from clients.load.plan import Plan, Request
from clients.load.plots import longer, thinned
from clients.load.records import Records
from clients.load.report import LoadRun, write_run
from clients.load.summary import summarise
from tests.clients.fake_triton import serve
from tests.load.servers import timed_server


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_a_run_prints_its_tables_and_leaves_records_summary_plots_and_page(runner: CliRunner, tmp_path: Path) -> None:
    with null_server() as url:
        # The limit is generous: what is tested is not this machine.
        options = ["--profile", "60x0.5, 60-90x0.5", "--class", "interactive 50%", "--class", "background 50%"]
        options += ["--processes", "1", "--late-limit", "5000", "--output", str(tmp_path)]
        result = runner.invoke(app, ["bench", url, *options])
    assert result.exit_code == 0, result.output
    for shown in ("answered, texts/s", "interactive", "background", "by length", "generator late"):
        assert shown in result.output
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["overall"]["requests"] == len(rows) > 30
    assert set(rows[0]) == {"scheduled", "sent", "done", "kind", "priority", "planned", "answered", "size", "status"}
    assert {path.name for path in tmp_path.glob("*.png")} == {"latency_cdf.png", "latency_time.png"}
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=.?https?:", page), "nothing is fetched"


def test_the_self_test_prints_the_generator_s_own_floor_and_highest_rate(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clients.load import selftest

    monkeypatch.setattr(selftest.measure_floor, "__kwdefaults__", {"rate": 50.0, "seconds": 0.5, "clients": 8})
    with null_server() as url:
        options = ["--clients", "2", "--seconds", "0.3", "--processes", "1", "--self-test"]
        result = runner.invoke(app, ["bench", url, *options])
    assert result.exit_code == 0, result.output
    found = re.search(r"P50 ([0-9.]+) ms, P99 ([0-9.]+) ms at 50/s .* at most ([0-9]+) requests/s", result.output)
    assert found, result.output
    assert 0 < float(found[1]) <= float(found[2])
    assert float(found[3]) > 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "5", "--clients", "3"], "more than one load"),
        (["--rate", "-1"], "--rate"),
        (["--profile", "nonsense"], "profile"),
        (["--class", "a 10%"], "100 %"),
        (["--trace", "/nowhere/trace.jsonl"], "cannot be read"),
        (["--protocol", "openai"], "does not fit"),
        (["--profile", ""], "profile"),
        (["--profile", "20x1", "--seconds", "5"], "--profile has no use for it: ['--seconds']"),
        (["--trace", "t.jsonl", "--mix", "100% 20"], "with it --speed"),
        (["--speed", "2"], "--rate has no use for it"),
        (["--clients", "3", "--arrivals", "constant"], "--clients has no use for it"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1e9"], "requests of the load"),
        (["--seconds", "5", "--warm", "5"], "leaves nothing"),
        (["--clients", "2", "--seconds", "inf"], "length of the run"),
        (["--deadline", "nan"], "deadline"),
        (["--processes", "65"], "processes of the generator"),
        (["--metrics", "127.0.0.1:8002/metrics"], "address of the metrics"),
        (["--output", "/proc/nothing/here"], "cannot be made"),
        (["--header", "no colon"], "no colon"),
        (["--root-certificate", "/nowhere/ca.pem"], "cannot be read"),
    ],
)
def test_a_load_that_cannot_be_meant_is_refused_before_anything_is_sent(
    runner: CliRunner, options: list[str], said: str
) -> None:
    result = runner.invoke(app, ["bench", "127.0.0.1:1", *options])
    assert result.exit_code == 2
    assert said in result.output


def test_a_server_that_answers_nothing_is_an_error(runner: CliRunner) -> None:
    result = runner.invoke(app, ["bench", "127.0.0.1:1", "--rate", "20", "--seconds", "0.2", "--processes", "1"])
    assert result.exit_code == 5
    assert "every request failed" in result.output
    assert "ServerUnavailable, for example: the server cannot be reached" in result.output


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_package_that_draws_is_asked_for_before_the_load_and_only_for_a_report(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == "clients.load.plots"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delattr("clients.load.plots", raising=False)
    with timed_server() as server:
        options = ["bench", server.url, "--rate", "40", "--seconds", "0.1", "--processes", "1", "--late-limit", "5000"]
        result = runner.invoke(app, [*options, "--output", str(tmp_path)])
        assert result.exit_code == 2
        assert f"{package} is not installed; to do: pip install" in result.output
        assert server.priorities == []
        assert runner.invoke(app, options).exit_code == 0


def test_a_key_is_sent_with_every_request(runner: CliRunner) -> None:
    with serve() as server:
        options = ["--rate", "40", "--seconds", "0.1", "--processes", "1", "--late-limit", "5000"]
        result = runner.invoke(app, ["bench", server.url, *options, "--token", "t", "--header", "X-Team: search"])
    assert result.exit_code == 0, result.output
    assert {(one.headers["authorization"], one.headers["x-team"]) for one in server.seen} == {("Bearer t", "search")}


def test_failed_requests_count_as_longer_than_any_in_the_plot() -> None:
    assert longer(4, 5).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_of_many_requests_the_slowest_are_drawn_whatever_their_number() -> None:
    latency, places = np.ones(50_000), np.arange(50_000)
    latency[777] = 900.0
    drawn = thinned(places, latency, 100)
    assert 777 in drawn
    assert len(drawn) == 501
    assert len(thinned(places[:10], latency, 1)) == 10


def test_metrics_add_the_plots_of_batches_queue_and_lanes(tmp_path: Path) -> None:
    records = Records()
    for number in range(5):
        records.add(Request(number / 10, "text", "all", 0, 9), number / 10, number / 10, number / 10 + 0.02, 9, "ok")
    values = {"nv_inference_count": {"encode": 1.0}, "nv_inference_exec_count": {"encode": 1.0}}
    readings = (Reading(0.0, values), Reading(1.0, {name: {"encode": 9.0} for name in values}))
    summary = summarise(records, Plan((), 1.0, True))
    write_run(tmp_path, LoadRun("a run", records, summary, readings), ["about <it>"])
    assert {"batch_sizes.png", "queue.png", "lanes.png"} <= {path.name for path in tmp_path.glob("*.png")}
    assert "about &lt;it&gt;" in (tmp_path / "report.html").read_text()


def test_texts_of_a_page_are_escaped() -> None:
    page = Page("<b>", ("<i>",), (PageSection("s", (Grid("t", ("<a>",), (("<td>",),)),), notes=("<n>",)),))
    html = render(page)
    assert not any(raw in html for raw in ("<b>", "<i>", "<a>", "<n>"))
