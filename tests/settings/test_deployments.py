"""Several models in one deploy.yaml: what an item takes from the file, its names, and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.errors import SettingsError
from builders.settings import load_deployments, load_settings
from tests.settings.test_deploy import ROOT, write

A = {"name": "minilm", "model": {"source": "package:any/model"}}
B = {"name": "topics", "model": {"source": "package:any/other", "max_tokens": 64}}


def refused(folder: Path, document: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_deployments(write(folder / "deploy.yaml", document))
    return str(caught.value)


def test_one_model_without_a_name_served_as_before() -> None:
    (only,) = load_deployments(ROOT / "deploy.cpu.yaml")
    assert only == load_settings(ROOT / "deploy.cpu.yaml")
    assert (only.name, only.entry_model, only.lane_model(128)) == ("", "encode", "encoder_128")


def test_each_item_of_the_list_a_model_with_names_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "deploy.yaml", {"models": [A, B]})
    first, second = load_deployments(file)
    assert (first.name, first.entry_model, first.lane_model(128)) == ("minilm", "encode_minilm", "encoder_minilm_128")
    assert (second.model.source, second.model.max_tokens) == ("package:any/other", 64)
    assert first.repository == second.repository == tmp_path / "model_repository"
    assert load_settings(file, "topics") == second


def test_item_takes_the_sections_of_the_file_and_merges_its_own_over_them(tmp_path: Path) -> None:
    own = B | {"buckets": [64], "lanes": {"short": {"batch": 2}}, "engine": {"batch_steps": [1, 2]}}
    shared = {"buckets": [128, 256], "lanes": {"short": {"batch": 4, "nice": 3}}, "objectives": {"p99_ms": 50}}
    first, second = load_deployments(write(tmp_path / "deploy.yaml", {**shared, "models": [A, own]}))
    assert (first.buckets, first.lanes.short.batch) == ((128, 256), 4)
    assert (second.buckets, second.lanes.short.batch, second.lanes.short.nice) == ((64,), 2, 3)
    assert (first.engine.batch_steps[-1], second.engine.batch_steps) == (32, (1, 2))
    assert first.objectives.p99_ms == second.objectives.p99_ms == 50


def test_list_takes_the_place_of_the_model_below_and_keeps_its_other_sections(tmp_path: Path) -> None:
    file = write(tmp_path / "deploy.yaml", {"extends": str(ROOT / "deploy.cpu.yaml"), "models": [A, B]})
    first, second = load_deployments(file)
    below = load_settings(ROOT / "deploy.cpu.yaml")
    assert first.engine == second.engine == below.engine
    assert first.repository == below.repository
    # What the file below says of its own model is not right for another one.
    assert first.model.max_tokens is None


def test_list_replaces_the_list_below_and_a_model_replaces_it_too(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", {"models": [A, B], "buckets": [64]})
    (only,) = load_deployments(write(tmp_path / "list.yaml", {"extends": "base.yaml", "models": [B]}))
    assert (only.name, only.buckets) == ("topics", (64,))
    single = load_settings(write(tmp_path / "one.yaml", {"extends": "base.yaml", "model": A["model"]}))
    assert (single.name, single.buckets) == ("", (64,))


def test_folder_of_an_item_taken_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below/base.yaml", {"models": [{"name": "own", "model": {"source": "weights/own"}}]})
    (only,) = load_deployments(write(tmp_path / "deploy.yaml", {"extends": "below/base.yaml"}))
    assert only.model.source == str(tmp_path / "below/weights/own")
    assert only.repository == tmp_path / "below/model_repository"


def test_one_of_several_refused_without_its_name_with_the_names(tmp_path: Path) -> None:
    file = write(tmp_path / "deploy.yaml", {"models": [A, B]})
    with pytest.raises(SettingsError, match=r"several models.*limit: one of minilm, topics; to do: .*--model minilm"):
        load_settings(file)
    with pytest.raises(SettingsError, match="no such model: 'minlm'; limit: one of minilm, topics"):
        load_settings(file, "minlm")
    with pytest.raises(SettingsError, match="one model, which has no name: 'minilm'; to do: leave --model out"):
        load_settings(ROOT / "deploy.cpu.yaml", "minilm")


def test_list_of_one_needs_no_name(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path / "deploy.yaml", {"models": [B]})).entry_model == "encode_topics"


@pytest.mark.parametrize(
    "name", [None, "", "128", "1st", "_a", "Mini", "mini-lm", "mini lm", "é", "a" * 65, 7, "a\n", "bert_2"]
)
def test_name_that_could_be_no_model_of_its_own_refused(tmp_path: Path, name: object) -> None:
    message = refused(tmp_path, {"models": [A, B | {"name": name}]})
    assert "models, item 2: this name cannot be one" in message
    assert "a letter first, no _<number> last, at most 64" in message


REFUSED: dict[str, tuple[Any, str]] = {
    "a name twice": ({"models": [A, A]}, "item 2: the name is taken: 'minilm'; to do: give each model its own"),
    "no list": ({"models": A}, "models is no list of models"),
    "an empty list": ({"models": []}, "models is no list of models: []; limit: - {name: minilm, model: {source: …}}"),
    "a null list": ({"models": None}, "models is no list of models"),
    "no mapping": ({"models": ["minilm"]}, "item 1 is no mapping: 'minilm'"),
    "both forms": ({"models": [A], "model": A["model"]}, "has `model` and `models`; to do: describe one model"),
    "a key of the model": (
        {"models": [{"name": "a", "source": "x"}]},
        "item 1 (a): no such section: 'source'; limit: name, model, buckets, lanes, entry, ensembles, "
        "engine, objectives; to do: write it below `model`",
    ),
    "an own repository": (
        {"models": [A | {"repository": "x"}]},
        "(minilm): no such section: 'repository'; limit: name, model, buckets, lanes, entry, ensembles, "
        "engine, objectives; to do: write it beside `models`",
    ),
    "a typo of a section": ({"models": [A | {"bucket": [1]}]}, "(minilm): no such section: 'bucket'"),
    "no model": ({"models": [A, {"name": "topics"}]}, "models.topics.model: missing"),
    "a wrong value": ({"models": [A, B | {"entry": {"batch": 0}}]}, "models.topics.entry.batch: 0; limit: "),
    "a conflict": ({"models": [A, B | {"buckets": [64, 32]}]}, "models.topics.buckets: [64, 32]; limit: rising"),
    "a name without a list": ({"name": "a", "model": A["model"]}, "a file of one model has none: 'a'; to do: remove"),
    "a typo of the list": ({"modles": [A]}, "did you mean models?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_list_refused_with_what_to_do(tmp_path: Path, case: str) -> None:
    document, words = REFUSED[case]
    assert words in refused(tmp_path, document)


def test_problem_of_a_shared_section_told_once(tmp_path: Path) -> None:
    message = refused(tmp_path, {"models": [A, B], "entry": {"batch": 0}})
    assert message.count("entry.batch") == 1
    assert "models." not in message
