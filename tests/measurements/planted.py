"""Does the bench see a planted slow-down, and nothing where there is none? `python -m tests.measurements.planted`.

The same build in two servers, then one of them slowed down by a tenth, in pairs; then 30 % against a stored run.
Takes about half an hour on two cores that do nothing else. Exit status 1 when the same build was called slower, or a
slow-down of that size or more was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from builders.bench.load import LoadSpec, make_load
from builders.bench.product import PATIENT, ProductDriver, Variant
from builders.bench.regression import PairSpec, against, pair_doubts, run_pairs, worse_without_figures
from builders.bench.result import BenchResult, make_result
from builders.bench.rounds import noise_of, run_rounds
from builders.settings import load_settings
from builders.source import open_source
from tests.tools.repositories import CACHE, ROOT
from tests.tools.slowdown import slow_down

SAY = Console(stderr=True, highlight=False)


#: Slow-downs from these on must be found: in pairs, and against a stored run.
PAIRED, STORED = 0.1, 0.3


def surprise(share: float, least: float, slower: bool) -> str | None:
    """What should not have come out, in words; None where it did not, and for a slow-down too small to count on."""
    if slower and share == 0:
        return "the same build was called slower"
    return f"a slow-down of {100 * share:g} % was not found" if share >= least and not slower else None


def main() -> int:
    """Print a line per comparison; 1 when one of them surprises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "deploy.cpu.yaml")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--pair-seconds", type=float, default=5)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.1], help="slow-downs in pairs")
    parser.add_argument("--stored-shares", type=float, nargs="*", default=[0.0, 0.3], help="against a stored run")
    parser.add_argument("--rate", type=float, default=20)
    options = parser.parse_args()
    settings = load_settings(options.config)
    source = open_source(settings.model)
    load = LoadSpec(rate=options.rate)
    found: list[str | None] = []

    def product(name: str, share: float, folder: Path) -> ProductDriver:
        variant = Variant(name, f"slowed down by {100 * share:g} %", PATIENT)
        return ProductDriver(
            settings, variant, folder, CACHE, SAY.print, change=lambda built: slow_down(built, share) if share else None
        )

    for share in options.shares:
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
            pair = PairSpec(options.pairs, options.pair_seconds)
            first, second = product("A", 0.0, Path(a)), product("B", share, Path(b))
            comparisons, measured = run_pairs(first, second, source, load, pair, SAY)
        for comparison in comparisons:
            print(f"{options.pairs} pairs, B slowed down by {100 * share:g} %: {comparison.text()}", flush=True)
        worse = worse_without_figures(measured, "A", "B")
        doubts = [*pair_doubts(measured, "A", "B"), *([worse] if worse else [])]
        slower = any(one.verdict == "slower" for one in comparisons)
        found.append("; ".join(doubts) or surprise(share, PAIRED, slower))

    def stored(share: float) -> BenchResult:
        with tempfile.TemporaryDirectory() as folder:
            driver = product("product", share, Path(folder))
            measured, speeds = run_rounds([driver], make_load(load, source), SAY)
        return make_result(
            measured,
            config=options.config,
            load=load,
            drivers={"product": driver.about},
            speeds=speeds,
            notes=noise_of(measured, speeds),
        )

    before = stored(0.0) if options.stored_shares else None
    for share in options.stored_shares:
        assert before is not None
        verdict = against(before, stored(share), "product")
        for comparison in verdict.comparisons:
            text = comparison.text() if verdict.comparable else f"no verdict: {'; '.join(verdict.doubts)}"
            print(f"against a stored run, slowed down by {100 * share:g} %: {text}", flush=True)
        if verdict.comparable:
            found.append(surprise(share, STORED, verdict.slower))
    surprises = [line for line in found if line is not None]
    for line in surprises:
        print(line, flush=True)
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
