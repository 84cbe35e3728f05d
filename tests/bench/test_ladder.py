"""The rows of the before/after table: each a real change of what is served, the last one the file itself."""

import ast
import io
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from builders.bench.cold import leave_cold
from builders.bench.command import rung_driver
from builders.bench.driver import BenchError
from builders.bench.ladder import Rung, ladder, not_in_table
from builders.bench.product import PATIENT, ProductDriver, Variant, merge, overridden
from builders.bench.rounds import started
from builders.fuse import list_steps
from builders.publish import SERVING
from builders.render import bucket_plan
from builders.settings import DeploySettings, load_settings
from builders.source import EncoderSource, open_source
from clients import EncoderClient
from tests.tools.repositories import CACHE, ROOT, settings_file
from tests.tools.tiny import tiny_model

STEPS = tuple(step.name for step in list_steps())


def rows(config: str, folder: Path) -> tuple[list[Rung], list[DeploySettings], EncoderSource]:
    """The rows of a settings file and what each serves; every combination is one that the settings accept."""
    settings = load_settings(ROOT / config)
    source = open_source(settings.model)
    rungs = ladder(settings, bucket_plan(settings, source), STEPS)
    return rungs, [overridden(settings, rung.variant, folder) for rung in rungs], source


def test_no_warm_row_finds_the_files_of_a_cold_one(tmp_path: Path) -> None:
    rungs, _, _ = rows("deploy.cpu.yaml", tmp_path)
    setup: Any = SimpleNamespace(
        settings=load_settings(ROOT / "deploy.cpu.yaml"), cache=CACHE, log=print, output=tmp_path
    )
    places = {True: set(), False: set()}
    for rung in rungs:
        places[rung.cold].add(rung_driver(setup, rung, tmp_path).settings.repository)
    assert places[True]
    assert places[False]
    assert not places[True] & places[False]


@pytest.mark.parametrize("config", ["deploy.cpu.yaml", "deploy.long.cpu.yaml", "deploy.yaml"])
def test_each_row_serves_something_else_and_the_last_is_the_file_itself(config: str, tmp_path: Path) -> None:
    rungs, changed, source = rows(config, tmp_path)
    served = [
        # What a bucket really takes, not what the settings ask for.
        (
            bucket_plan(one, source).buckets,
            one.entry,
            one.engine.precision,
            rung.variant.skip,
            rung.priorities,
            rung.cold,
        )
        for one, rung in zip(changed, rungs, strict=True)
    ]
    assert all(a != b for a, b in pairwise(served))
    last = overridden(load_settings(ROOT / config), Variant("file", "as it is", PATIENT), tmp_path)
    whole = [one for one, rung in zip(changed, rungs, strict=True) if "int8" not in rung.variant.name]
    assert whole[-1].model_dump(exclude={"repository"}) == last.model_dump(exclude={"repository"})
    assert rungs[0].variant.skip == STEPS
    assert not rungs[0].priorities
    assert (rungs[-1].priorities, rungs[-1].cold, rungs[-1].variant.skip) == (True, False, ())


def test_the_rows_of_the_cpu_are_those_of_the_reference_case(tmp_path: Path) -> None:
    rungs, changed, source = rows("deploy.cpu.yaml", tmp_path)
    assert [rung.variant.name for rung in rungs] == [
        "graph alone", "+ position table", "+ fused operators", "+ batch tokenisation", "+ processes",
        "+ length buckets", "+ dynamic batches", "+ late answers", "+ warm-up", "+ priorities", "+ int8",
    ]  # fmt: skip
    batches = {
        rung.variant.name: [bucket.batch for bucket in bucket_plan(one, source).buckets]
        for one, rung in zip(changed, rungs, strict=True)
    }
    assert batches["graph alone"] == [1]
    assert batches["+ length buckets"] == [1] * 6
    assert batches["+ dynamic batches"] == [8, 8, 4, 2, 1, 1]
    assert {step for step in STEPS if step not in rungs[1].variant.skip} == {"clean", "positions"}
    assert [rung.cold for rung in rungs].index(False) == 8
    long, *_ = rows("deploy.long.cpu.yaml", tmp_path)
    assert "+ long lane" in [rung.variant.name for rung in long]


def test_what_a_cpu_cannot_show_is_said() -> None:
    found = dict(not_in_table(load_settings(ROOT / "deploy.cpu.yaml")))
    names = " ".join(found)
    assert all(word in names for word in ("pinned", "merged", "CUDA graphs", "memory pool", "timeout", "backlog"))
    assert any("bench-gpu" in why for why in found.values())


def made_up(folder: Path, lane: str, entry: str) -> Any:
    """A finished build of one bucket, as far as `leave_cold` looks at one."""
    for model, code in (("encoder_16", lane), ("encode", entry)):
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "1" / "model.py").write_text(code)
    plan = SimpleNamespace(buckets=(SimpleNamespace(model="encoder_16"),))
    return SimpleNamespace(repository=folder, plan=plan, version=1, entry_model="encode")


def test_warm_up_is_taken_out_of_the_copies_of_a_build_alone(tmp_path: Path) -> None:
    lane, entry = ((SERVING / name / "model.py").read_text(encoding="utf-8") for name in ("lane", "entry"))
    built = made_up(tmp_path / "repository", lane, entry)
    files = [tmp_path / "repository" / model / "1" / "model.py" for model in ("encoder_16", "encode")]
    os.link(files[0], tmp_path / "published.py")
    leave_cold(built)
    # The last definition of a name is the one that Triton's call of `initialize` finds.
    assert [ast.parse(file.read_text()).body[-1].name for file in files] == ["warm_up", "FirstCalls"]
    assert (tmp_path / "published.py").read_text() == lane
    with pytest.raises(BenchError, match="does not import warm_up"):
        leave_cold(made_up(tmp_path / "other", "pass", entry))


@pytest.mark.slow
def test_server_without_its_warm_up_comes_up_and_answers(tmp_path: Path) -> None:
    model = {"source": str(tiny_model(tmp_path / "model", "embedding")), "max_tokens": None}
    settings = load_settings(settings_file(tmp_path, "deploy.cpu.yaml", model=model, buckets=[32, 64]))
    driver = ProductDriver(settings, Variant("cold", "", PATIENT), tmp_path, CACHE, print, leave_cold)
    with started(driver, Console(file=io.StringIO())) as target, EncoderClient(target.url) as client:
        assert client.encode(["How far is the moon?"]).embeddings.shape[0] == 1


def test_overrides_that_cannot_work_name_the_row(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "deploy.cpu.yaml")
    with pytest.raises(BenchError, match="settings of 'odd' cannot work"):
        overridden(settings, Variant("odd", "", {"lanes": {"short": {"batch": 4096}}}), tmp_path)


def test_other_settings_publish_into_another_folder(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "deploy.cpu.yaml")
    one, same, other = (
        overridden(settings, Variant(name, "", {"entry": {"processes": count}}), tmp_path).repository
        for name, count in (("a", 1), ("b", 1), ("c", 3))
    )
    assert one == same != other


def test_shared_repository_is_one_for_all_that_build_the_same_version(tmp_path: Path) -> None:
    settings = load_settings(ROOT / "deploy.cpu.yaml")
    changes = [{}, {"entry": {"processes": 1, "window_ms": 5.0}}, {"lanes": {"short": {"threads": 2}}}]
    changes += [{"buckets": (64, 512)}, {"lanes": {"short": {"batch": 2}}}]
    found = [overridden(settings, Variant("a", "", one), tmp_path, share=True).repository for one in changes]
    assert found[0] == found[1] == found[2]
    assert len(set(found[2:])) == 3


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 5}, "d": [2]}
    assert merge(base, over) == {"a": {"b": 5, "c": 2}, "d": [2]}
    assert (base, over) == ({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 5}, "d": [2]})
