"""Two models in one repository without a server: numbers, state, promote and rollback of each are its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

import builders.versions
from builders.bucket import BucketPlan
from builders.cli import app
from builders.errors import LoadError, ManifestError, PromoteError, PublishError, SettingsError, StateError
from builders.lock import repository_lock
from builders.manifest import check_complete, published_versions, read_manifest
from builders.names import entry_model, lane_model
from builders.publish import VersionParts, find_version, publish_version, sweep
from builders.render import facts_of_manifest, render_versions, stale_configs, write_configs
from builders.settings import DeploySettings, load_deployments
from builders.state import Served, read_state, served_now, write_state
from builders.versions import check_served, list_versions, promote, record_start, rollback
from tests.builders.test_publish import LENGTHS, contents, parts, plan
from tests.builders.test_versions import NONE, FakeServer
from tests.tools.repositories import ROOT

NAMES = ("one", "two")


def named_plan(name: str, lengths: tuple[int, ...] = LENGTHS) -> BucketPlan:
    bare = plan(*lengths)
    return replace(bare, buckets=tuple(replace(bucket, name=name) for bucket in bare.buckets))


def named_parts(folder: Path, name: str, mark: str) -> VersionParts:
    made = parts(folder, mark)
    return replace(made, manifest=made.manifest.model_copy(update={"name": name}))


def publish(repository: Path, folder: Path, name: str, mark: str) -> int:
    return publish_version(repository, named_plan(name), named_parts(folder / f"{name}-{mark}", name, mark))


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builders.publish._sync_file", lambda path: None)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, DeploySettings]:
    document = {
        "extends": str(ROOT / "deploy.cpu.yaml"),
        "repository": str(tmp_path / "r"),
        "buckets": list(LENGTHS),
        "models": [{"name": name, "model": {"source": "package:any/model"}} for name in NAMES],
    }
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump(document))
    return {settings.name: settings for settings in load_deployments(tmp_path / "deploy.yaml")}


@pytest.fixture
def repository(models: dict[str, DeploySettings], tmp_path: Path) -> Path:
    """Three versions of `one`, two of `two`; version 1 of each is served, from its configurations on."""
    where = models["one"].repository
    for name, marks in (("one", "abc"), ("two", "de")):
        for mark in marks:
            publish(where, tmp_path, name, mark)
        promote(where, models[name], 1, None, print, machine=NONE)
    return where


@pytest.fixture
def server(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake = FakeServer(repository)
    fake.start()
    monkeypatch.setattr(builders.versions, "ModelControl", lambda url, key, tls: fake)
    return fake


def of(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """The files of one model."""
    marks = (f"encode_{name}/", f"encoder_{name}_", f".served.{name}.")
    return {path: data for path, data in files.items() if path.startswith(marks)}


# What lies in the repository


def test_each_model_counts_its_own_versions(repository: Path, tmp_path: Path) -> None:
    assert [published_versions(repository, name) for name in (*NAMES, "")] == [(1, 2, 3), (1, 2), ()]
    assert find_version(repository, "e", "two") == 2
    assert find_version(repository, "e", "one") is None
    before = contents(repository)
    assert publish(repository, tmp_path, "two", "f") == 3
    assert of(contents(repository), "one") == of(before, "one")
    for name in NAMES:
        check_complete(repository, 3, read_manifest(repository, 3, name), hashes=True)


def test_folders_and_state_of_a_model_carry_its_name(repository: Path) -> None:
    found = {path.name for path in repository.iterdir()}
    lanes = {lane_model(name, length) for name in NAMES for length in LENGTHS}
    files = {f".{what}" for name in NAMES for what in (f"served.{name}.json", f"builders.{name}.lock")}
    assert found == lanes | files | {"encode_one", "encode_two"}
    state = json.loads((repository / ".served.one.json").read_text())
    assert state["entries"] == {"encode_one": {"served": 1, "previous": None, "lanes": [1]}}


def test_version_copied_from_another_model_refused(repository: Path) -> None:
    (repository / "encode_one/2").rename(repository / "encode_two/9")
    with pytest.raises(ManifestError, match="published as another model: 'encode_one'; limit: encode_two; to do: make"):
        read_manifest(repository, 9, "two")


def test_what_an_interrupted_build_of_another_model_left_kept(repository: Path) -> None:
    staging = repository / "encode_one/.staging-4-abc"
    staging.mkdir()
    (repository / "encoder_one_16/4").mkdir()
    (staging / "lanes.json").write_text('{"version": 4, "lanes": ["encoder_one_16"]}')
    assert sweep(repository, "two") == []
    assert sweep(repository) == []
    assert staging.exists()
    assert sweep(repository, "one") == ["encoder_one_16/4", "encode_one/.staging-4-abc"]


def test_one_model_free_while_another_is_built(repository: Path) -> None:
    with repository_lock(repository, name="one"):
        with repository_lock(repository, wait_s=0.2, name="two"):
            pass
        with pytest.raises(PublishError, match="another build, promote or rollback of model one works on"):
            repository_lock(repository, wait_s=0.2, name="one").__enter__()


def test_broken_state_of_one_model_does_not_stop_the_other(repository: Path) -> None:
    (repository / ".served.one.json").write_text("{")
    with pytest.raises(StateError, match=r"\.served\.one\.json.*then version 3, the newest, is served"):
        served_now(repository, "one")
    assert served_now(repository, "two") == Served(served=1, lanes=(1,))


# Configurations


def test_two_models_rendered_with_names_of_their_own(models: dict[str, DeploySettings], repository: Path) -> None:
    texts: dict[str, str] = {}
    for name, settings in models.items():
        facts = {1: facts_of_manifest(settings, read_manifest(repository, 1, name))}
        configs = render_versions(settings, facts, 1)
        assert list(configs) == [*(lane_model(name, length) for length in LENGTHS), entry_model(name)]
        assert not set(configs) & set(texts)
        texts |= configs
        config = text_format.Parse(configs[entry_model(name)], model_config_pb2.ModelConfig())
        parameters = json.loads(config.parameters["entry"].string_value)
        assert config.name == entry_model(name)
        # An entry calls no lanes but its own.
        assert [bucket["model"] for bucket in parameters["buckets"]] == [lane_model(name, length) for length in LENGTHS]


def test_configurations_of_another_model_kept_when_buckets_are_gone(
    models: dict[str, DeploySettings], repository: Path
) -> None:
    fewer = models["one"].model_copy(update={"buckets": (64,)})
    facts = facts_of_manifest(fewer, read_manifest(repository, 1, "one"))
    configs = render_versions(fewer, {1: replace(facts, plan=named_plan("one", (64,)))}, 1)
    before = of(contents(repository), "two")
    gone = {path.parent.name for path in stale_configs(repository, set(configs), "one")}
    assert gone == {"encoder_one_16", "encoder_one_32"}
    write_configs(repository, configs, "one")
    assert not (repository / "encoder_one_16/config.pbtxt").exists()
    assert of(contents(repository), "two") == before
    assert list(stale_configs(repository, set())) == []


# What is served


def test_promote_and_rollback_of_one_model_leave_the_other_as_it_is(
    repository: Path, models: dict[str, DeploySettings], server: FakeServer
) -> None:
    before, loaded = of(contents(repository), "two"), server.index()
    promote(repository, models["one"], 3, "server", print, machine=NONE)
    assert server.calls == [*(f"load encoder_one_{length}" for length in LENGTHS), "load encode_one"]
    assert (server.loaded["encode_one"], server.loaded["encoder_one_16"]) == ((3,), (1, 3))
    assert read_state(repository, "one") == Served(served=3, previous=1, lanes=(1, 3))
    promote(repository, models["one"], 2, "server", print, machine=NONE, keep_old=False)
    rollback(repository, models["one"], "server", print, machine=NONE)
    assert server.loaded["encode_one"] == (3,)
    assert not any("two" in call for call in server.calls)
    assert {name: found for name, found in server.loaded.items() if "two" in name} == {
        name: found for name, found in loaded.items() if "two" in name
    }
    assert of(contents(repository), "two") == before
    with pytest.raises(PromoteError, match=r"no version of model two to go back to.*make promote VERSION=N MODEL=two"):
        rollback(repository, models["two"], "server", print, machine=NONE)


def test_failed_promote_of_one_model_puts_back_nothing_of_the_other(
    repository: Path, models: dict[str, DeploySettings], server: FakeServer
) -> None:
    promote(repository, models["two"], 2, "server", print, machine=NONE)
    before, loaded = contents(repository), server.index()
    server.fail_at = len(server.calls) + 1
    with pytest.raises(LoadError, match="planted"):
        promote(repository, models["one"], 2, "server", print, machine=NONE)
    assert server.index() == loaded
    configs = {path: data for path, data in before.items() if path.endswith((".pbtxt", ".json"))}
    assert {path: contents(repository)[path] for path in configs} == configs


def test_versions_and_start_of_each_model_its_own(repository: Path, models: dict[str, DeploySettings]) -> None:
    promote(repository, models["two"], 2, None, print, machine=NONE)
    assert [(row.version, row.served) for row in list_versions(repository, "one")] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    assert [(row.version, row.served) for row in list_versions(repository, "two")] == [(1, False), (2, True)]
    (repository / "encoder_two_16/2/model.onnx").unlink()
    check_served(repository, NONE, name="one")
    with pytest.raises(ManifestError, match=r"encoder_two_16/2/model\.onnx is missing"):
        check_served(repository, NONE, name="two")
    (repository / ".served.one.json").unlink()
    record_start(repository, "one")
    assert read_state(repository, "one") == Served(served=3, lanes=(3,))
    assert read_state(repository) is None


def test_model_without_a_name_lives_beside_named_ones(repository: Path, tmp_path: Path) -> None:
    before = contents(repository)
    assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / "bare", "bare")) == 1
    write_state(repository, Served(served=1, lanes=(1,)))
    assert published_versions(repository) == (1,)
    assert {path: data for path, data in contents(repository).items() if path in before} == before


# The commands


def test_commands_work_on_the_named_model_and_ask_for_the_name(
    repository: Path, models: dict[str, DeploySettings]
) -> None:
    config = ["--config", str(repository.parent / "deploy.yaml")]
    run = CliRunner()
    for command in (["promote", "2", "--offline"], ["rollback", "--offline"], ["verify"], ["plan"]):
        refused = run.invoke(app, [*command, *config])
        assert isinstance(refused.exception, SettingsError), command
        assert "one of one, two" in str(refused.exception)
    done = run.invoke(app, ["promote", "2", "--offline", "--model", "two", *config])
    assert done.exit_code == 0, done.output
    assert "two: the next start serves version 2 instead of 1" in done.output
    assert read_state(repository, "two") == Served(served=2, previous=1, lanes=(1, 2))
    assert read_state(repository, "one") == Served(served=1, lanes=(1,))
    assert run.invoke(app, ["rollback", "--offline", "--model", "two", *config]).exit_code == 0
    assert read_state(repository, "two") == Served(served=1, previous=2, lanes=(1, 2))
    missing = run.invoke(app, ["promote", "7", "--offline", "--model", "one", *config])
    assert str(missing.exception).startswith("model one: ")
    assert "no such version of model one: 7; limit: published: 1, 2, 3" in str(missing.exception)


def test_versions_lists_all_models_and_tells_of_one_that_is_in_no_settings(repository: Path) -> None:
    (repository / "encode_old").mkdir()
    (repository / "encode_old/config.pbtxt").touch()
    config = ["--config", str(repository.parent / "deploy.yaml")]
    every = CliRunner().invoke(app, ["versions", *config]).output
    assert every.index("one (encode_one)") < every.index("two (encode_two)")
    assert "encode_old is in" in every
    assert "it is left alone and not loaded" in every
    assert (repository / "encode_old/config.pbtxt").exists()
    assert "encode_two" not in CliRunner().invoke(app, ["versions", "--model", "one", *config]).output
