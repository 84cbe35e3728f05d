"""Pairs of real servers whose lanes take a known time and no CPU. The real engine: tests/measurements/planted.py."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.product import PATIENT, CheckoutDriver, ProductDriver, Variant
from builders.bench.regression import PairSpec, failed_more, pair_comparisons, run_pairs
from builders.bench.rounds import Measurement
from builders.build import BuildResult
from builders.settings import load_settings
from builders.source import EncoderSource, open_source
from clients.load.plan import Plan, Request
from clients.load.records import Records
from clients.load.summary import summarise
from tests.bench.servers import FakeDriver
from tests.tools.repositories import CACHE, ROOT

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


def test_too_few_pairs_and_a_checkout_that_is_none_are_refused(source: EncoderSource, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="at least 6"):
        run_pairs(FakeDriver("A"), FakeDriver("B"), source, LoadSpec(), PairSpec(5), QUIET)
    with pytest.raises(BenchError, match="no such checkout"):
        CheckoutDriver("A", tmp_path, Path("deploy.cpu.yaml"), tmp_path)


def test_another_checkout_publishes_into_a_repository_of_its_code_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own may be held at an older version, and would then be measured instead of its code."""
    checkout, config = tmp_path / "checkout", Path("deploy.cpu.yaml")
    (checkout / "builders").mkdir(parents=True)
    (checkout / "clients").mkdir()
    (checkout / "builders" / "cli.py").write_text("")
    for file in ROOT.glob("deploy*.yaml"):
        shutil.copy(file, checkout)

    def started() -> tuple[list[str], Path]:
        driver = CheckoutDriver("A", checkout, config, tmp_path / "work")
        monkeypatch.setattr(driver._child, "start", lambda: None)
        driver.start()
        command = driver._child.command
        return command, Path(command[command.index("--config") + 1])

    command, own = started()
    settings, theirs = load_settings(own), load_settings(checkout / config)
    assert settings.repository == own.parent / "model_repository"
    assert settings.entry.interactive.timeout_ms == 600_000
    assert settings.lanes == theirs.lanes
    assert command[command.index("--cache") + 1] == str(checkout / "build" / "cache")
    (settings.repository / ".served.json").write_text("{}")
    assert started()[1] == own
    assert not list(settings.repository.iterdir()), "what an earlier start had noted is forgotten"
    (checkout / "builders" / "new.py").write_text("")
    assert started()[1] != own


def test_failed_requests_are_no_way_to_be_faster() -> None:
    well, ill = turns("A", 0.05), turns("B", 0.04)
    assert failed_more([*well, *ill], "A", "B") is None
    for one in ill:
        one.records.status[::10] = ["Overloaded"] * len(one.records.status[::10])
    assert failed_more([*well, *ill], "A", "B") == "B failed 10.0 % of its requests, A 0.0 %: worse"
    assert failed_more([*ill, *turns("C", 0.04)], "B", "C") is None
