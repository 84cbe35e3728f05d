"""deploy.yaml: the files that are checked in, `extends`, and every rule across fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.errors import SettingsError
from builders.settings import DeploySettings, load_settings

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {"model": {"source": "package:any/model"}}


def write(path: Path, document: object) -> Path:
    text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, document: object) -> str:
    file = write(folder / "deploy.yaml", document)
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    return str(caught.value)


# The files of the repository


def test_production_file_gives_the_defaults_of_the_code() -> None:
    loaded = load_settings(ROOT / "deploy.yaml")
    defaults = DeploySettings(model=loaded.model, repository=loaded.repository)
    assert loaded == defaults, "deploy.yaml and the defaults in builders/settings/ have drifted apart"


def test_production_file_holds_the_objectives_and_the_queue_of_the_design() -> None:
    loaded = load_settings(ROOT / "deploy.yaml")
    assert (loaded.objectives.p99_ms, loaded.objectives.gpu_utilization, loaded.objectives.accuracy_loss) == (
        400,
        0.70,
        0.005,
    )
    assert (loaded.entry.window_ms, loaded.entry.batch, loaded.entry.interactive.timeout_ms) == (10, 32, 200)
    assert loaded.repository == ROOT / "model_repository"
    assert loaded.buckets == (128, 256, 512, 1024, 2048)


def test_cpu_file_overrides_only_what_it_names() -> None:
    cpu, production = load_settings(ROOT / "deploy.cpu.yaml"), load_settings(ROOT / "deploy.yaml")
    assert cpu.engine.kind == "onnxruntime"
    assert cpu.repository == ROOT / "build/cpu/model_repository"
    assert (cpu.model.max_tokens, cpu.model.tile_positions) == (512, None)
    assert cpu.lanes.short.batch == 8
    # Not named in deploy.cpu.yaml:
    assert cpu.model.source == production.model.source
    assert cpu.lanes.short.up_to == production.lanes.short.up_to
    assert cpu.entry.background == production.entry.background
    assert cpu.objectives.accuracy_loss == production.objectives.accuracy_loss


def test_long_cpu_file_extends_a_file_that_extends_another() -> None:
    long, cpu = load_settings(ROOT / "deploy.long.cpu.yaml"), load_settings(ROOT / "deploy.cpu.yaml")
    assert (long.model.max_tokens, long.model.tile_positions) == (2048, 2048)
    assert long.repository == ROOT / "build/long/model_repository"
    assert long.engine == cpu.engine
    assert long.lanes == cpu.lanes


# extends


def test_mapping_merged_and_list_replaced_when_extended(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", GOOD | {"buckets": [64, 128], "lanes": {"short": {"batch": 4, "nice": 3}}})
    over = {"extends": "base.yaml", "buckets": [32], "lanes": {"short": {"batch": 2}}}
    loaded = load_settings(write(tmp_path / "over.yaml", over))
    assert loaded.buckets == (32,)
    assert (loaded.lanes.short.batch, loaded.lanes.short.nice) == (2, 3)


def test_paths_taken_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "base.yaml", {"model": {"source": "models/a"}, "repository": "repo"})
    middle = write(tmp_path / "deep/middle.yaml", {"extends": "../base.yaml", "lanes": {"short": {"batch": 2}}})
    inherited = load_settings(middle)
    assert inherited.model.source == str(tmp_path / "models/a")
    assert inherited.repository == tmp_path / "repo"
    own = write(tmp_path / "deep/own.yaml", {"extends": "middle.yaml", "model": {"source": "b"}, "repository": "mine"})
    assert load_settings(own).model.source == str(tmp_path / "deep/b")
    assert load_settings(own).repository == tmp_path / "deep/mine"


def test_absolute_paths_kept_as_they_are(tmp_path: Path) -> None:
    document = {"model": {"source": "/models/a"}, "repository": "/srv/repo"}
    loaded = load_settings(write(tmp_path / "deploy.yaml", document))
    assert (loaded.model.source, loaded.repository) == ("/models/a", Path("/srv/repo"))


def test_repository_beside_the_file_when_not_named(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path / "deploy.yaml", GOOD)).repository == tmp_path / "model_repository"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_cycle_of_extends_refused_with_the_file(tmp_path: Path, length: int) -> None:
    for number in range(length):
        write(tmp_path / f"{number}.yaml", {"extends": f"{(number + 1) % length}.yaml"})
    with pytest.raises(SettingsError, match=r"extend each other.*0\.yaml.*to do: remove one"):
        load_settings(tmp_path / "0.yaml")


def test_missing_file_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no such settings file: .*gone\.yaml.*to do: .*--config"):
        load_settings(tmp_path / "gone.yaml")


def test_missing_base_refused_with_its_path(tmp_path: Path) -> None:
    assert "base.yaml" in refused(tmp_path, {"extends": "base.yaml"})


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words", "7"])
def test_file_that_is_no_mapping_refused_with_what_it_is(tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert "is no mapping" in message
    assert type(yaml.safe_load(text)).__name__ in message
    assert "to do: " in message


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tmodel: x", "x: !!python/object:os.system {}"])
def test_bad_yaml_refused_with_the_file_and_the_place(tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert str(tmp_path / "deploy.yaml") in message
    assert "line 1" in message


def test_bytes_that_are_not_utf8_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(SettingsError, match=r"deploy\.yaml cannot be read as YAML.*utf-8"):
        load_settings(file)


def test_folder_in_place_of_a_file_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path)


# Unknown keys


@pytest.mark.parametrize(
    ("document", "name", "near"),
    [
        ({"bucket": [128]}, "bucket", "buckets"),
        ({"entry": {"proceses": 2}}, "entry.proceses", "processes"),
        ({"lanes": {"short": {"late-from": 256}}}, "lanes.short.late-from", "late_from"),
        ({"entry": {"interactive": {"timeout": 3, "queue_size": 1}}}, "entry.interactive.timeout", "timeout_ms"),
    ],
)
def test_typo_refused_with_the_key_that_was_meant(
    tmp_path: Path, document: dict[str, Any], name: str, near: str
) -> None:
    line = next(line for line in refused(tmp_path, GOOD | document).splitlines() if f"  {name}: " in line)
    assert f"did you mean {near}?" in line
    assert "known keys are" in line


def test_unknown_key_like_no_other_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD | {"zzz": 1})
    assert "zzz: 1" in message
    assert "buckets, engine, ensembles, entry, extends, lanes, model, models, objectives, repository" in message
    assert "to do: remove it" in message


def test_key_of_another_section_refused_with_the_keys_of_this_one(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD | {"engine": {"window_ms": 1}})
    assert "engine.window_ms: 1" in message
    assert "max_batch_tokens" in message


def test_missing_source_refused_with_its_meaning(tmp_path: Path) -> None:
    message = refused(tmp_path, {"model": {}})
    assert "model.source: missing" in message
    assert "package:NAME/PATH" in message


def test_every_wrong_field_named_when_several_are_wrong(tmp_path: Path) -> None:
    document = {"entry": {"processes": 0, "batch": 9999}, "engine": {"kind": "x"}}
    message = refused(tmp_path, GOOD | document)
    assert all(name in message for name in ("entry.processes: 0", "entry.batch: 9999", "engine.kind: 'x'"))
    assert message.count("to do: ") == 3


# Rules across fields: document, then what the one line must hold (field, value, limit, remedy)

CONFLICTS = {
    "unsorted buckets": ({"buckets": [256, 128]}, "buckets: [256, 128]", "rising", "write [128, 256]"),
    "a bucket twice": ({"buckets": [128, 128, 256]}, "buckets: [128, 128, 256]", "none twice", "write [128, 256]"),
    "overlapping lanes": (
        {"lanes": {"long": {"above": 256}}},
        "lanes.long.above: 256",
        "not below lanes.short.up_to = 512: the lanes overlap",
        "set lanes.long.above to 512",
    ),
    "orphan buckets": (
        {"lanes": {"short": {"up_to": 128}}},
        "buckets: [256, 512]",
        "short up to 128, long above 512",
        "set lanes.long.above to 128, or drop those buckets",
    ),
    "late_from above up_to": (
        {"lanes": {"short": {"late_from": 1024}}},
        "lanes.short.late_from: 1024",
        "at most lanes.short.up_to = 512",
        "name a bucket of the short lane",
    ),
    "short batch above the engine": (
        {"lanes": {"short": {"batch": 33}}},
        "lanes.short.batch: 33",
        "at most engine.max_batch = 32",
        "lower the lane's batch, or raise engine.max_batch",
    ),
    "long batch above the engine": (
        {"lanes": {"long": {"batch": 33}}},
        "lanes.long.batch: 33",
        "at most engine.max_batch = 32",
        "lower the lane's batch, or raise engine.max_batch",
    ),
    "int8 of a plan": (
        {"engine": {"precision": "int8"}},
        "engine.precision: int8",
        "fp16, bf16 or fp32 with engine.kind tensorrt",
        "set engine.precision to fp16",
    ),
    "fp16 on a CPU": (
        {"engine": {"kind": "onnxruntime", "precision": "fp16"}},
        "engine.precision: fp16",
        "fp32 or int8 with engine.kind onnxruntime",
        "set engine.precision to fp32",
    ),
    "degrade below not under above": (
        {"entry": {"degrade": {"enabled": True, "above": 64, "below": 64}}},
        "entry.degrade.below: 64",
        "less than entry.degrade.above = 64, or it would switch to and fro",
        "set entry.degrade.below to 16",
    ),
    "degrade above both queues": (
        {"entry": {"degrade": {"enabled": True, "above": 9217}}},
        "entry.degrade.above: 9217",
        "at most 9216, the queue sizes of both levels",
        "lower entry.degrade.above",
    ),
    "small batch no smaller": (
        {"entry": {"degrade": {"enabled": True, "batch": 32}}},
        "entry.degrade.batch: 32",
        "less than entry.batch = 32",
        "lower entry.degrade.batch",
    ),
    "long bound below the entry's batch": (
        {"lanes": {"long": {"bound": 31}}},
        "lanes.long.bound: 31",
        "at least entry.batch = 32",
        "set lanes.long.bound to 32 or more",
    ),
    "unsorted steps": (
        {"engine": {"batch_steps": [1, 4, 2]}},
        "engine.batch_steps: [1, 4, 2]",
        "rising from 1",
        "begin with 1 and sort",
    ),
    "steps that do not begin with 1": (
        {"engine": {"batch_steps": [2, 4]}},
        "engine.batch_steps: [2, 4]",
        "rising from 1",
        "begin with 1 and sort",
    ),
    "graphs without the arena": (
        {"engine": {"techniques": ["pinned", "graphs"]}},
        "engine.techniques: ['pinned', 'graphs']",
        "each needs those before it",
        "add what is missing or drop what follows",
    ),
    "no steps": ({"engine": {"batch_steps": []}}, "engine.batch_steps: []", "rising from 1", "begin with 1 and sort"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflict_refused_with_field_value_limit_and_remedy(tmp_path: Path, case: str) -> None:
    document, value, limit, remedy = CONFLICTS[case]
    line = refused(tmp_path, GOOD | document).splitlines()[-1]
    assert line.strip().startswith(value)
    assert limit in line.partition("limit: ")[2].partition("to do: ")[0]
    assert remedy in line.partition("to do: ")[2]


@pytest.mark.parametrize(
    "document",
    [
        {"lanes": {"short": {"up_to": 256}, "long": {"above": 256}}},
        {"lanes": {"short": {"late_from": 512}}},
        {"lanes": {"short": {"batch": 32}, "long": {"batch": 32, "bound": 32}}},
        # Below the longest bucket, which then takes one text at a time.
        {"engine": {"max_batch_tokens": 256}},
        {"engine": {"kind": "onnxruntime", "precision": "int8"}},
        {"engine": {"batch_steps": [1]}},
        # Numbers of what is off are never used.
        {"entry": {"degrade": {"above": 1, "below": 9, "batch": 64}}},
        {"entry": {"degrade": {"enabled": True, "above": 9216, "below": 9215, "batch": 31}}},
        # No bucket of the long lane: its bound is never used.
        {"buckets": [128], "lanes": {"long": {"bound": 1}}},
        # No bucket lies between the lanes, so nothing is an orphan.
        {"buckets": [128, 1024], "lanes": {"short": {"up_to": 128}, "long": {"above": 512}}},
    ],
)
def test_value_at_the_limit_accepted(tmp_path: Path, document: dict[str, Any]) -> None:
    loaded = load_settings(write(tmp_path / "deploy.yaml", GOOD | document))
    for section, values in document.items():
        own = getattr(loaded, section)
        assert own == tuple(values) if isinstance(values, list) else own.model_fields_set >= set(values)


# Known defects; each turns green with its fix.


@pytest.mark.parametrize("value", [None, {"a": 1}, ["a"]])
def test_repository_that_is_no_path_refused(tmp_path: Path, value: object) -> None:
    assert "repository" in refused(tmp_path, GOOD | {"repository": value})


def test_empty_source_refused(tmp_path: Path) -> None:
    assert "model.source" in refused(tmp_path, {"model": {"source": ""}})


def test_source_in_the_home_folder_not_taken_relative_to_the_file(tmp_path: Path) -> None:
    loaded = load_settings(write(tmp_path / "deploy.yaml", {"model": {"source": "~/models/a"}}))
    assert str(tmp_path) not in loaded.model.source


def test_impossible_date_refused_with_the_file(tmp_path: Path) -> None:
    assert "deploy.yaml" in refused(tmp_path, "model: {source: 2024-13-45}")


def test_one_key_of_a_level_given_keeps_the_default_of_the_other(tmp_path: Path) -> None:
    document = GOOD | {"entry": {"interactive": {"timeout_ms": 300}}}
    loaded = load_settings(write(tmp_path / "deploy.yaml", document))
    assert (loaded.entry.interactive.timeout_ms, loaded.entry.interactive.queue_size) == (300, 1024)


def test_typo_in_extends_refused_with_the_key_that_was_meant(tmp_path: Path) -> None:
    assert "did you mean extends?" in refused(tmp_path, GOOD | {"extend": "base.yaml"})


# Ensembles


@pytest.mark.parametrize(
    ("buckets", "words"),
    [([256, 128], "rising, none twice"), ([128, 128], "rising, none twice"), ([100], "some of `buckets`")],
    ids=["falling", "twice", "no bucket"],
)
def test_ensembles_refused_when_their_buckets_are_none_of_the_deployments(
    tmp_path: Path, buckets: list[int], words: str
) -> None:
    message = refused(tmp_path, GOOD | {"ensembles": {"buckets": buckets}})
    assert "ensembles.buckets" in message
    assert words in message
