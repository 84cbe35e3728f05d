"""Promote, rollback and list without a server: what is written down, and a server that fails at any step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from rich.console import Console
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

import builders.versions
from builders.cli import app
from builders.errors import AnswerError, BuilderError, LoadError, ManifestError, PromoteError
from builders.manifest import Machine
from builders.publish import find_version, publish_version
from builders.render import facts_of_manifest, render_versions
from builders.settings import DeploySettings, load_settings
from builders.state import Candidate, Served, read_state, write_state
from builders.version_table import version_table
from builders.versions import check_served, list_versions, promote, record_start, rollback
from tests.builders.test_publish import LENGTHS, contents, manifest, parts, plan
from tests.tools.repositories import settings_file

NONE = Machine()


@pytest.fixture
def settings(tmp_path: Path) -> DeploySettings:
    return load_settings(settings_file(tmp_path, "deploy.cpu.yaml"))


@pytest.fixture
def repository(settings: DeploySettings, tmp_path: Path) -> Path:
    return publish_three(settings, tmp_path)


def publish_three(settings: DeploySettings, tmp_path: Path) -> Path:
    """Versions 1, 2 and 3, the third with other buckets; 1 is served."""
    for number, lengths in enumerate((LENGTHS, LENGTHS, (16, 128)), start=1):
        publish_version(settings.repository, plan(*lengths), parts(tmp_path / f"made{number}", f"{number}", lengths))
    write_state(settings.repository, Served(served=1, lanes=(1,)))
    return settings.repository


def served_by_configs(repository: Path) -> dict[str, list[int]]:
    found = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        found[config.name] = list(config.version_policy.specific.versions)
    return found


class FakeServer:
    """A server by what it reads of the repository's configurations, like Triton in explicit mode."""

    def __init__(self, repository: Path, size: int = 4):
        self.repository, self.size = repository, size
        self.loaded: dict[str, tuple[int, ...]] = {}
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.vector = np.zeros((1, size), dtype=np.float32)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        self.loaded = {name: tuple(found) for name, found in served_by_configs(self.repository).items()}

    def load(self, model: str) -> None:
        self.calls.append(f"load {model}")
        if self.fail_at is not None and len(self.calls) > self.fail_at:
            self.fail_at = None
            raise LoadError(f"{model} could not be loaded: planted")
        self.loaded[model] = tuple(served_by_configs(self.repository)[model])
        # What answers must always find the lanes of its own version.
        for version in self.loaded.get("encode", ()):
            for length in (16, 128) if version == 3 else LENGTHS:
                assert version in self.loaded[f"encoder_{length}"], self.calls

    def unload(self, model: str) -> None:
        self.calls.append(f"unload {model}")
        self.loaded.pop(model, None)

    def index(self) -> dict[str, tuple[int, ...]]:
        return dict(self.loaded)

    def ready_versions(self, model: str) -> tuple[int, ...]:
        return self.loaded.get(model, ())

    def wait_served(self, model: str, versions: tuple[int, ...]) -> None:
        assert set(versions) <= set(self.loaded[model])

    def ask_lane(self, model: str, version: int, widths: dict[str, int], output: str) -> np.ndarray:
        assert version in self.loaded[model]
        return np.zeros((1, self.size), dtype=np.float32)

    def ask_entry(self, model: str, version: int, texts: dict[str, str], output: str) -> np.ndarray:
        assert self.loaded[model] == (version,)
        return self.vector


@pytest.fixture
def server(repository: Path, settings: DeploySettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake = FakeServer(repository)
    monkeypatch.setattr(builders.versions, "ModelControl", lambda url, key, tls: fake)
    # The configurations of version 1 alone, and a server that has them.
    promote(repository, settings, 2, None, print, machine=NONE)
    promote(repository, settings, 1, None, print, machine=NONE, keep_old=False)
    write_state(repository, Served(served=1, lanes=(1,)))
    fake.start()
    return fake


def test_promote_loads_the_lanes_of_both_first_and_the_entry_last(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    done = promote(repository, settings, 2, "server", print, machine=NONE)
    assert server.calls == ["load encoder_16", "load encoder_32", "load encoder_64", "load encode"]
    assert server.loaded == {f"encoder_{length}": (1, 2) for length in LENGTHS} | {"encode": (2,)}
    assert (done.served, done.previous, done.lanes_loaded) == (2, 1, True)
    assert read_state(repository) == Served(served=2, previous=1, lanes=(1, 2))


def test_rollback_loads_the_entry_alone_when_the_lanes_are_kept(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    promote(repository, settings, 2, "server", print, machine=NONE)
    server.calls.clear()
    # Settings that have changed since, and a broken new version, are no reason to wait.
    (repository / "encode/2/manifest.json").write_text("broken")
    short = settings.lanes.short.model_copy(update={"window_ms": 5.0})
    changed = settings.model_copy(update={"lanes": settings.lanes.model_copy(update={"short": short})})
    done = rollback(repository, changed, "server", print, machine=NONE)
    assert server.calls == ["load encode"]
    assert (done.served, done.lanes_loaded) == (1, False)
    assert read_state(repository) == Served(served=1, previous=2, lanes=(1, 2))


def test_lanes_of_a_third_version_take_the_place_of_the_first_ones(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    promote(repository, settings, 2, "server", print, machine=NONE)
    promote(repository, settings, 3, "server", print, machine=NONE)
    assert server.loaded == {
        "encoder_16": (2, 3), "encoder_32": (2,), "encoder_64": (2,), "encoder_128": (3,), "encode": (3,),
    }  # fmt: skip
    promote(repository, settings, 3, "server", print, machine=NONE, keep_old=False)
    assert server.loaded == {"encoder_16": (3,), "encoder_128": (3,), "encode": (3,)}
    assert served_by_configs(repository) == {name: list(found) for name, found in server.loaded.items()}
    assert read_state(repository) == Served(served=3, previous=2, lanes=(3,))
    rollback(repository, settings, "server", print, machine=NONE)
    assert server.loaded["encode"] == (2,)


@pytest.mark.parametrize("step", range(4))
def test_everything_put_back_when_a_load_fails(
    repository: Path, settings: DeploySettings, server: FakeServer, step: int
) -> None:
    loaded, configs = server.index(), {p: p.read_bytes() for p in repository.glob("*/config.pbtxt")}
    server.fail_at = step
    with pytest.raises(LoadError, match="planted"):
        promote(repository, settings, 2, "server", print, machine=NONE)
    assert server.index() == loaded
    assert {p: p.read_bytes() for p in repository.glob("*/config.pbtxt")} == configs
    assert read_state(repository) == Served(served=1, lanes=(1,))


@pytest.mark.parametrize("vector", [np.full((1, 4), np.nan), np.zeros((1, 5))], ids=["NaN", "another size"])
def test_everything_put_back_when_the_new_version_answers_wrongly(
    repository: Path, settings: DeploySettings, server: FakeServer, vector: np.ndarray
) -> None:
    loaded = server.index()
    server.vector = vector
    with pytest.raises(AnswerError, match="encode version 2 answers wrongly"):
        promote(repository, settings, 2, "server", print, machine=NONE)
    assert server.index() == loaded


def test_new_lanes_unloaded_again_when_the_promote_fails(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    server.vector = np.full((1, 4), np.nan)
    with pytest.raises(AnswerError):
        promote(repository, settings, 3, "server", print, machine=NONE)
    assert "encoder_128" not in server.loaded
    assert not (repository / "encoder_128/config.pbtxt").exists()


def test_server_believed_when_the_state_file_says_otherwise(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    write_state(repository, Served(served=3, lanes=(3,)))
    lines: list[str] = []
    done = promote(repository, settings, 2, "server", lines.append, machine=NONE)
    assert done.previous == 1
    assert "the server serves version 1, not 3 as the state file says" in lines


def test_nothing_loaded_when_the_version_is_served_already(
    repository: Path, settings: DeploySettings, server: FakeServer
) -> None:
    promote(repository, settings, 1, "server", print, machine=NONE)
    assert server.calls == []


def test_rollback_refused_when_nothing_was_promoted(repository: Path, settings: DeploySettings) -> None:
    with pytest.raises(PromoteError, match="no version to go back to; limit: published: 1, 2, 3"):
        rollback(repository, settings, None, print)


@pytest.mark.parametrize("profiles", [(0, 1), (1, 0)])
def test_plans_with_another_profile_of_one_bucket_refused_side_by_side(
    settings: DeploySettings, profiles: tuple[int, int]
) -> None:
    native = settings.model_copy(update={"engine": settings.engine.model_copy(update={"kind": "tensorrt"})})
    made = [manifest(lengths=lengths).model_copy(update={"engine": "tensorrt"}) for lengths in ((16, 64), (64, 128))]
    facts = {version: facts_of_manifest(native, made[profile]) for version, profile in enumerate(profiles, start=1)}
    with pytest.raises(BuilderError, match="encoder_64 has another profile in each version"):
        render_versions(native, facts, 1)
    assert render_versions(settings, facts, 1)


def test_lanes_rendered_alike_whichever_version_answers(repository: Path, settings: DeploySettings) -> None:
    facts = {1: facts_of_manifest(settings, manifest()), 2: facts_of_manifest(settings, manifest(lengths=(16, 512)))}
    one, two = render_versions(settings, facts, 1), render_versions(settings, facts, 2)
    assert one.pop("encode") != two.pop("encode")
    assert one == two


def test_versions_listed_with_their_state_and_what_is_wrong(repository: Path) -> None:
    write_state(repository, Served(served=2, previous=1, lanes=(1, 2)))
    (repository / "encoder_128/3/model.onnx").unlink()
    rows = list_versions(repository)
    assert [(row.version, row.served, row.previous, row.loaded) for row in rows] == [
        (1, False, True, True), (2, True, False, True), (3, False, False, False),
    ]  # fmt: skip
    assert "encoder_128/3/model.onnx is missing" in rows[2].problem


def test_version_on_trial_listed_with_its_share(repository: Path) -> None:
    lease = {"version": 2, "share": 0.05, "deadline_s": 5.0, "entry": {}}
    for until, shown in ((time.time() + 60, "canary, 5.0%"), (time.time() - 1, "canary's lanes left")):
        write_state(repository, Served(served=1, lanes=(1,), candidate=Candidate(**lease, until=until)))
        rows = list_versions(repository)
        assert [row.trial is not None for row in rows] == [False, True, False]
        console = Console(width=140, record=True)
        console.print(version_table(rows))
        assert shown in console.export_text().splitlines()[2]


def test_start_refused_when_what_is_served_is_damaged(repository: Path) -> None:
    check_served(repository, NONE)
    (repository / "encoder_16/1/model.onnx").unlink()
    with pytest.raises(ManifestError, match=r"damaged.*make build-engines, then python -m builders promote"):
        check_served(repository, NONE)


# A plan of which a byte is another, as a failing disk leaves it: of the same size


H200 = Machine(gpu="NVIDIA H200", compute_capability="9.0", tensorrt="10.14.1")


@pytest.fixture
def plans(tmp_path: Path) -> tuple[DeploySettings, Path]:
    """Versions 1 (served) and 2 of `engine.kind: tensorrt`, and version 2's one plan."""
    settings = load_settings(settings_file(tmp_path, "deploy.yaml"))
    assert settings.engine.kind == "tensorrt"
    for number in ("1", "2"):
        made = parts(tmp_path / f"made{number}", number)
        engine = tmp_path / f"{number}.plan"
        engine.write_bytes(b"plan " + number.encode() * 1000)
        facts = {"engine": "tensorrt", "machine": H200, "fingerprint": number}
        publish_version(
            settings.repository,
            plan(*LENGTHS),
            replace(made, engine=engine, manifest=made.manifest.model_copy(update=facts)),
        )
    write_state(settings.repository, Served(served=1, lanes=(1,)))
    return settings, settings.repository / "encoder_32/2/model.plan"


OLDER = H200.model_copy(update={"tensorrt": "10.13.3"})


@pytest.fixture
def upgraded(plans: tuple[DeploySettings, Path]) -> DeploySettings:
    """Version 1 is of an older TensorRT; version 2 is served, by the newer one, with the older one's lanes left out."""
    settings, _ = plans
    file = settings.repository / "encode/1/manifest.json"
    file.write_text(file.read_text().replace(H200.tensorrt or "", OLDER.tensorrt or ""))
    lines: list[str] = []
    promote(settings.repository, settings, 2, None, lines.append, machine=H200)
    assert any("lanes of version 1 are left out of the next start: the plan was made" in line for line in lines)
    assert read_state(settings.repository) == Served(served=2, previous=1, lanes=(2,))
    return settings


def test_rollback_offline_refused_where_the_plans_are_of_another_tensorrt(upgraded: DeploySettings) -> None:
    before = contents(upgraded.repository)
    with pytest.raises(ManifestError, match=r"TensorRT 10\.13\.3.*TensorRT 10\.14\.1.*make build-engines"):
        rollback(upgraded.repository, upgraded, None, print, machine=H200)
    assert contents(upgraded.repository) == before
    assert read_state(upgraded.repository) == Served(served=2, previous=1, lanes=(2,))


def test_rollback_offline_leaves_out_the_lanes_that_the_older_tensorrt_cannot_load(upgraded: DeploySettings) -> None:
    repository, lines = upgraded.repository, list[str]()
    rollback(repository, upgraded, None, lines.append, machine=OLDER)
    assert any("lanes of version 2 are left out of the next start" in line for line in lines)
    assert read_state(repository) == Served(served=1, previous=2, lanes=(1,))
    assert served_by_configs(repository) == {"encode": [1]} | {f"encoder_{length}": [1] for length in LENGTHS}
    check_served(repository, OLDER)


def damage(path: Path) -> None:
    """Change one byte, in a file of its own: the lanes share one."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_promote_refused_before_anything_changes_when_a_plan_is_corrupted(plans: tuple[DeploySettings, Path]) -> None:
    settings, file = plans
    repository = settings.repository
    damage(file)
    before = contents(repository)
    words = r"damaged: model\.plan of encoder_32 is not the file that was published; to do: make build-engines"
    with pytest.raises(ManifestError, match=words):
        promote(repository, settings, 2, None, print, machine=H200)
    after = contents(repository)
    after.pop(".builders.lock")
    assert after == before


def test_start_refused_when_a_served_plan_is_corrupted(plans: tuple[DeploySettings, Path]) -> None:
    settings, file = plans
    promote(settings.repository, settings, 2, None, print, machine=H200)
    check_served(settings.repository, H200)
    damage(file)
    with pytest.raises(ManifestError, match=r"model\.plan of encoder_32 is not the file that was published"):
        check_served(settings.repository, H200)
    # The build has just compared these.
    check_served(settings.repository, H200, whole=(1, 2))


def test_version_published_anew_when_a_plan_of_the_old_one_is_corrupted(plans: tuple[DeploySettings, Path]) -> None:
    settings, file = plans
    assert find_version(settings.repository, "2") == 2
    damage(file)
    assert find_version(settings.repository, "2") is None
    # Which the list of versions does not look for: it would read every plan.
    assert [row.problem for row in list_versions(settings.repository)] == ["", ""]


def test_start_recorded_once(repository: Path) -> None:
    (repository / ".served.json").unlink()
    record_start(repository)
    assert read_state(repository) == Served(served=3, lanes=(3,))
    write_state(repository, Served(served=1, lanes=(1,)))
    record_start(repository)
    assert read_state(repository) == Served(served=1, lanes=(1,))


def test_commands_promote_list_and_roll_back_without_a_server(repository: Path, settings: DeploySettings) -> None:
    config = ["--config", str(repository.parent / "deploy.test.yaml")]
    run = CliRunner()
    assert run.invoke(app, ["promote", "2", "--offline", *config]).exit_code == 0
    assert read_state(repository) == Served(served=2, previous=1, lanes=(1, 2))
    listed = run.invoke(app, ["versions", *config])
    assert listed.exit_code == 0
    assert "served" in listed.output
    assert run.invoke(app, ["rollback", "--offline", *config]).exit_code == 0
    assert read_state(repository) == Served(served=1, previous=2, lanes=(1, 2))
    assert served_by_configs(repository)["encode"] == [1]
    refused = run.invoke(app, ["promote", "2", "--control-key", "no-value", *config])
    assert isinstance(refused.exception, BuilderError)
