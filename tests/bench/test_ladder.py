from itertools import pairwise
from pathlib import Path

import pytest

from builders.bench.driver import BenchError
from builders.bench.ladder import ladder
from builders.bench.product import PATIENT, Variant, merge, overridden
from builders.fuse import list_steps
from builders.render import bucket_plan
from builders.settings import load_settings
from builders.source import open_source
from tests.tools.repositories import ROOT

STEPS = tuple(step.name for step in list_steps())


@pytest.mark.parametrize("config", ["deploy.cpu.yaml", "deploy.long.cpu.yaml", "deploy.yaml"])
def test_each_row_has_one_thing_more_and_the_last_is_the_file_itself(config: str, tmp_path: Path) -> None:
    settings = load_settings(ROOT / config)
    rungs = [
        rung
        for rung in ladder(settings, bucket_plan(settings, open_source(settings.model)), STEPS)
        if "int8" not in rung.variant.name
    ]
    # Every combination is one that the settings accept.
    changed = [overridden(settings, rung.variant, tmp_path) for rung in rungs]
    keys = [
        (one.model_dump(exclude={"repository"}), rung.variant.skip, rung.priorities)
        for one, rung in zip(changed, rungs, strict=True)
    ]
    assert all(a != b for a, b in pairwise(keys))
    last = overridden(settings, Variant("file", "as it is", PATIENT), tmp_path)
    assert changed[-1].model_dump(exclude={"repository", "engine"}) == last.model_dump(exclude={"repository", "engine"})
    assert rungs[0].variant.skip == STEPS
    assert not rungs[0].priorities
    assert rungs[-1].priorities


def test_the_rows_of_the_cpu_are_those_of_the_reference_case() -> None:
    settings = load_settings(ROOT / "deploy.cpu.yaml")
    names = [r.variant.name for r in ladder(settings, bucket_plan(settings, open_source(settings.model)), STEPS)]
    assert names[0] == "graph alone"
    wanted = ["+ fused operators", "+ batch tokenisation", "+ dynamic batches", "+ length buckets", "+ priorities"]
    assert [name for name in names if name in wanted] == wanted


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
