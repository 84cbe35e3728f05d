"""Pairs of real servers whose lanes take a known time and no CPU. The real engine: tests/measurements/planted.py."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from builders.bench import command, product, regression, rounds
from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.product import PATIENT, CheckoutDriver, ProductDriver, Variant
from builders.bench.regression import PairSpec, pair_comparisons, pair_doubts, run_pairs, worse_without_figures
from builders.bench.rounds import Measurement
from builders.build import BuildResult
from builders.cli import app
from builders.settings import load_deployments, load_settings
from builders.source import EncoderSource, open_source
from clients.load.plan import Plan, Request
from clients.load.records import Records
from clients.load.summary import summarise
from tests.bench.servers import FakeDriver
from tests.tools.repositories import CACHE, ROOT, settings_file

QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def source() -> EncoderSource:
    return open_source(load_settings(ROOT / "deploy.cpu.yaml").model)


def timed(name: str, service_s: float, folder: Path) -> ProductDriver:
    def change(built: BuildResult) -> None:
        code = (ROOT / "tests" / "tools" / "timed_lane.py").read_text(encoding="utf-8")
        code = code.replace("SERVICE_S = 0.0", f"SERVICE_S = {service_s}")
        for model in built.models:
            if model.startswith("encoder_"):
                (built.repository / model / str(built.version) / "model.py").write_text(code, encoding="utf-8")

    settings = load_settings(ROOT / "deploy.cpu.yaml")
    return ProductDriver(settings, Variant(name, "timed lanes", PATIENT), folder, CACHE, lambda line: None, change)


@pytest.mark.slow
def test_a_tenth_more_of_service_time_is_found_in_pairs_and_nothing_in_equal_builds(
    tmp_path: Path, source: EncoderSource
) -> None:
    load, spec = LoadSpec(rate=20, mix="100% 20", processes=1), PairSpec(8, 2.0)
    base = timed("A", 0.150, tmp_path / "a")
    slow, _ = run_pairs(base, timed("B", 0.165, tmp_path / "b"), source, load, spec, QUIET)
    same, _ = run_pairs(base, timed("B", 0.150, tmp_path / "c"), source, load, spec, QUIET)
    assert len(slow) >= 2, "something was compared"
    assert {one.figure for one in slow} == {one.figure for one in same}
    assert any(one.verdict == "slower" for one in slow), [one.text() for one in slow]
    assert not any(one.verdict == "slower" for one in same), [one.text() for one in same]


def turns(name: str, latency_s: float, cpu_ms: float = 0.0) -> list[Measurement]:
    """Six turns of a server by known figures: `1 / latency_s` texts a second, each after `latency_s`."""
    plan = Plan((Request(0.0, "text", "all", 0, 9),), 10.0, True)
    made = []
    for number in range(6):
        records = Records()
        for place in range(int(10 / latency_s)):
            at = place * latency_s
            records.add(plan.requests[0], at, at, at + latency_s * (1 + 0.001 * number), 0, "ok")
        for loop, clients in (("closed", 1), ("open", 0)):
            summary = summarise(records, plan, clients=clients)
            cpu = cpu_ms * (1 + 0.001 * number)
            made.append(Measurement(name, number, loop, summary, records, 0.5, cpu))  # type: ignore[arg-type]
    return made


def test_the_slower_of_a_pair_is_named_by_both_figures() -> None:
    slow = pair_comparisons([*turns("A", 0.05), *turns("B", 0.055)], "A", "B")
    assert [(one.figure, one.verdict) for one in slow] == [("throughput, texts/s", "slower"), ("P50, ms", "slower")]
    assert slow[1].cost.ratio == pytest.approx(1.1, abs=0.005)
    same = pair_comparisons([*turns("A", 0.05), *turns("B", 0.05)], "A", "B")
    assert [one.verdict for one in same] == ["same", "same"]


def test_more_cpu_time_a_text_is_named_when_answers_are_as_fast() -> None:
    slow = pair_comparisons([*turns("A", 0.05, cpu_ms=20), *turns("B", 0.05, cpu_ms=21)], "A", "B")
    assert [(one.figure, one.verdict) for one in slow] == [
        ("throughput, texts/s", "same"),
        ("CPU time, ms a text", "slower"),
        ("P50, ms", "same"),
    ]
    assert slow[1].cost.ratio == pytest.approx(1.05, abs=0.005)


@pytest.mark.slow
def test_both_of_a_pair_get_the_same_texts_and_the_slower_one_is_named(source: EncoderSource) -> None:
    first, second = FakeDriver("A", 0.02), FakeDriver("B", 0.2)
    comparisons, measured = run_pairs(first, second, source, LoadSpec(rate=10, clients=2), PairSpec(6, 0.4), QUIET)
    found = {one.figure: one.verdict for one in comparisons}
    assert found["throughput, texts/s"] == found["P50, ms"] == "slower"
    assert len(measured) == 6 * 2 * 2
    opened = [one for one in measured if one.loop == "open" and one.round == 3]
    assert opened[0].records.size == opened[1].records.size
    assert {one.driver for one in opened} == {"A", "B"}
    assert any(one.others_share > 0 for one in measured), "the other side should idle: here it is the same process"


def test_too_few_pairs_and_a_checkout_that_is_none_are_refused(source: EncoderSource, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="at least 6"):
        run_pairs(FakeDriver("A"), FakeDriver("B"), source, LoadSpec(), PairSpec(5), QUIET)
    with pytest.raises(BenchError, match="no such checkout"):
        CheckoutDriver("A", tmp_path, Path("deploy.cpu.yaml"), tmp_path)


def checkout_of(folder: Path, **settings: object) -> tuple[Path, Path]:
    """The root of a checkout that has only what is looked at before it is started, and its settings file."""
    (folder / "builders").mkdir(parents=True)
    (folder / "builders" / "cli.py").write_text("")
    for file in ROOT.glob("deploy*.yaml"):
        shutil.copy(file, folder)
    (folder / "deploy.bench.yaml").write_text(json.dumps({"extends": "deploy.cpu.yaml", **settings}))
    return folder, Path("deploy.bench.yaml")


def silenced(driver: CheckoutDriver, monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None] = lambda: None) -> Path:
    """The settings file of a driver whose server is not really started."""
    monkeypatch.setattr(driver._child, "start", lambda: None)
    monkeypatch.setattr(driver._child, "stop", stop)
    words = driver._child.command
    return Path(words[words.index("--config") + 1])


def test_another_checkout_publishes_into_an_empty_repository_that_goes_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own may be held at an older version; one that was kept would serve the newest, whatever the build found."""
    checkout, config = checkout_of(tmp_path / "checkout")
    driver = CheckoutDriver("A", checkout, config, tmp_path / "work")

    def interrupted() -> None:
        raise KeyboardInterrupt

    own = silenced(driver, monkeypatch, interrupted)
    driver.start()
    settings, theirs = load_settings(own), load_settings(checkout / config)
    assert settings.repository == own.parent / "model_repository"
    assert settings.entry.interactive.timeout_ms == 600_000
    assert settings.lanes == theirs.lanes
    words = driver._child.command
    assert words[words.index("--cache") + 1] == str(checkout / "build" / "cache")
    (settings.repository / "encode" / "2").mkdir(parents=True)
    driver.start()  # after a bench that was killed
    assert not settings.repository.exists()
    with pytest.raises(KeyboardInterrupt):
        driver.stop()
    assert not list((tmp_path / "work").iterdir())


def test_models_with_queue_timeouts_of_their_own_are_patient_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        {"name": "hasty", "model": {"source": "models/a"}, "entry": {"interactive": {"timeout_ms": 50}, "batch": 16}},
        {"name": "plain", "model": {"source": "package:somewhere/b"}, "buckets": [64]},
    ]
    checkout, config = checkout_of(tmp_path / "checkout", models=models)
    driver = CheckoutDriver("A", checkout, config, tmp_path / "work", model="hasty")
    own = silenced(driver, monkeypatch)
    driver.start()
    before, after = load_deployments(checkout / config), load_deployments(own)
    assert before[0].entry.interactive.timeout_ms == 50
    assert {one.entry.interactive.timeout_ms for one in after} == {600_000}
    for old, new in zip(before, after, strict=True):
        assert (old.name, old.model, old.buckets, old.entry.batch) == (
            new.name,
            new.model,
            new.buckets,
            new.entry.batch,
        )
        assert new.repository == own.parent / "model_repository"


def test_repository_of_the_bench_that_serves_what_other_code_published_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits in turn: the first one's version is there, but the newest is what is served."""
    settings = load_settings(ROOT / "deploy.cpu.yaml")
    driver = ProductDriver(settings, Variant("A", "", PATIENT), tmp_path, CACHE, lambda line: None)
    repository = driver.settings.repository
    (repository / "encode" / "2").mkdir(parents=True)

    def build(*_: object) -> SimpleNamespace:
        served = 2 if (repository / "encode" / "2").exists() else 1
        return SimpleNamespace(repository=repository, version=1, served=served)

    monkeypatch.setattr(product, "build", build)
    assert driver._build().served == 1


def test_failed_requests_are_no_way_to_be_faster() -> None:
    well, ill = turns("A", 0.05), turns("B", 0.04)
    assert worse_without_figures([*well, *ill], "A", "B") is None
    for one in ill:
        one.records.status[::10] = ["Overloaded"] * len(one.records.status[::10])
    assert worse_without_figures([*well, *ill], "A", "B") == "B failed 10.0 % of its requests, A 0.0 %: worse"
    assert worse_without_figures([*ill, *turns("C", 0.04)], "B", "C") is None


def test_figure_that_a_turn_does_not_have_is_left_out_and_nothing_is_proved() -> None:
    well, slow = turns("A", 0.05), turns("B", 0.05)
    assert pair_doubts([*well, *slow], "A", "B") == []
    slow[0] = replace(slow[0], summary=replace(slow[0].summary, throughput=0.0))
    assert [one.figure for one in pair_comparisons([*well, *slow], "A", "B")] == ["P50, ms"]
    (doubt,) = pair_doubts([*well, *slow], "A", "B")
    assert doubt.startswith("B answered nothing in time in 1 of 12 turns; lengthen them")
    assert pair_comparisons([*well[2:], *slow[2:]], "A", "B") == [], "five pairs"


def test_generator_that_was_late_in_many_turns_proves_nothing() -> None:
    both = [*turns("A", 0.05), *turns("B", 0.05)]
    late = [replace(one, summary=replace(one.summary, valid=False)) for one in both]
    assert pair_doubts([*late[:4], *both[4:]], "A", "B") == []
    assert "generator was late" in pair_doubts([*late[:5], *both[5:]], "A", "B")[0]


def paired(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: FakeDriver, second: FakeDriver
) -> tuple[int, str, Path]:
    """`bench --paired` with servers in this process; its exit status, what it said, its folder."""
    sides = {"A": first, "B": second}
    monkeypatch.setattr(command, "_product", lambda setup, name, settings, patient: sides[name])
    monkeypatch.setattr(rounds, "summarise", partial(rounds.summarise, late_limit_ms=1e6))
    config, output = settings_file(folder, "deploy.cpu.yaml", objectives={"rate": 20}), folder / "out"
    words = ["bench", "--config", str(config), "--paired", str(config), "--pairs", "6", "--pair-seconds", "1"]
    ended = CliRunner().invoke(app, [*words, "--clients", "4", "--output", str(output)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output, output


def test_side_that_answers_nothing_is_worse_and_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said, output = paired(tmp_path, monkeypatch, FakeDriver("A"), FakeDriver("B", answers=0))
    assert code == 1, said
    assert "B answered nothing, A did not: worse" in said
    stored = json.loads((output / "paired.json").read_text())
    kept = [(row["driver"], row["loop"], bool(row["latencies"])) for row in stored["rows"]]
    assert sorted(kept) == [(name, loop, name == "A") for name in "AB" for loop in ("closed", "open")]
    assert len((output / "rows.jsonl").read_text().splitlines()) == 4, "no further pair was measured"


def silent(name: str, ended: str = "") -> list[Measurement]:
    """A side that was lost in the first pair: nothing in it was answered."""
    lost = []
    for one in turns(name, 0.05)[:2]:
        records = replace(one.records, status=["ServerUnavailable"] * len(one.records))
        lost.append(replace(one, records=records, summary=replace(one.summary, throughput=0.0), ended=ended))
    return lost


@pytest.mark.parametrize(
    ("measured", "code", "said"),
    [
        ([*turns("A", 0.05), *turns("B", 0.05)], 0, "same"),
        ([*turns("A", 0.05), *turns("B", 0.06)], 1, "slower"),
        ([*turns("A", 0.05)[:2], *silent("B", "ended by itself; bad words")], 1, "B ended by itself, A did not: worse"),
        ([*silent("A"), *turns("B", 0.05)[:2]], 3, "no verdict: A ended by itself or answered nothing"),
        ([*silent("A"), *silent("B")], 3, "no verdict: A ended by itself or answered nothing"),
    ],
)  # fmt: skip
def test_exit_status_of_pairs_is_what_they_prove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Measurement], code: int, said: str
) -> None:
    monkeypatch.setattr(regression, "run_pairs", lambda *_: (pair_comparisons(measured, "A", "B"), measured))
    found, printed, output = paired(tmp_path, monkeypatch, FakeDriver("A"), FakeDriver("B"))
    assert found == code, printed
    assert said in printed
    assert ("B: ended by itself; bad words" in printed) == any(one.ended for one in measured)
    assert f"{len({one.round for one in measured})} of 6 pairs" in printed
    assert (output / "paired.json").is_file()


def test_side_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with pytest.raises(BenchError, match="B: it does not start"):  # `python -m builders` ends with 2 then
        paired(tmp_path, monkeypatch, FakeDriver("A", log=log), FakeDriver("B", log=log, broken=True))
    assert log == ["start A", "start B", "stop B", "stop A"]
    assert not (tmp_path / "out" / "paired.json").exists()
