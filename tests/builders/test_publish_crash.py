"""A build that is killed at any point leaves the repository as it was, or with the whole version."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builders.manifest import check_complete, published_versions, read_manifest
from builders.publish import publish_version, sweep
from tests.builders.test_publish import LENGTHS, contents, is_complete, parts, plan, staging, tree

KILLS = 20
#: Publishes into argv[1]; the process kills itself before call number argv[3] of those that change files (0: never).
CHILD = """
import os, shutil, signal, sys
from pathlib import Path
from builders.publish import publish_version
from tests.builders.test_publish import LENGTHS, parts, plan

made, point = 0, int(sys.argv[3])

def hooked(real):
    def call(*args, **options):
        global made
        made += 1
        if made == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

version = parts(Path(sys.argv[2]), "new")
for name in ("mkdir", "rmdir", "replace", "link", "unlink", "fsync", "open"):
    setattr(os, name, hooked(getattr(os, name)))
shutil.copyfile = hooked(shutil.copyfile)
publish_version(Path(sys.argv[1]), plan(*LENGTHS), version)
print(made)
"""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the children do wait."""
    monkeypatch.setattr("builders.publish._sync_file", lambda path: None)


def publish_in_child(repository: Path, made: Path, point: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(repository), str(made), str(point)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip


def one_whole_version(repository: Path, version: int) -> bool:
    check_complete(repository, version, read_manifest(repository, version), hashes=True)
    return is_complete(repository, version, "new")


def prepared(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """A repository with version 1, and its files."""
    folder.mkdir()
    repository = folder / "r"
    publish_version(repository, plan(*LENGTHS), parts(folder / "old", "old"))
    return repository, contents(repository)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Calls that a whole publication makes."""
    folder = tmp_path_factory.mktemp("whole")
    repository, _ = prepared(folder / "a")
    done = publish_in_child(repository, folder / "new", 0)
    assert done.returncode == 0, done.stderr
    assert one_whole_version(repository, 2)
    return int(done.stdout)


def test_repository_whole_when_the_build_is_killed_at_twenty_random_points(tmp_path: Path, calls: int) -> None:
    assert calls > 60
    chance = random.Random()
    # Any point; the moves and the clean-up are few and come last, so a part of the kills aims at them.
    points = [chance.randint(1, calls) for _ in range(KILLS // 2)]
    points += [chance.randint(calls - 40, calls) for _ in range(KILLS - len(points))]
    print(f"killed before calls {points} of {calls}")
    committed = 0
    for number, point in enumerate(points):
        repository, before = prepared(tmp_path / str(number))
        done = publish_in_child(repository, tmp_path / str(number) / "new", point)
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
        # Nothing of version 1 changed, and version 2 is there whole or is not named by anything.
        assert {name: data for name, data in contents(repository).items() if name in before} == before, point
        new = published_versions(repository) == (1, 2)
        committed += new
        assert not new or one_whole_version(repository, 2), point
        if number % 4 == 0:
            # The sweep is killed as well, early: it is finished by the next build.
            again = publish_in_child(repository, tmp_path / str(number) / "new", chance.randint(1, 12))
            assert again.returncode == -signal.SIGKILL, (point, again.stderr)
        sweep(repository)
        assert not staging(repository)
        if not new:
            assert contents(repository) == before, point
        expected = 3 if new else 2
        assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / str(number) / "new")) == expected
        assert one_whole_version(repository, expected), point
    print(f"{committed} of {KILLS} were whole")


def test_empty_repository_empty_again_when_the_first_build_is_killed_between_two_moves(
    tmp_path: Path, calls: int
) -> None:
    repository = tmp_path / "r"
    for point in range(calls - 45, calls - 30, 5):
        done = publish_in_child(repository, tmp_path / "new", point)
        assert done.returncode == -signal.SIGKILL
        if published_versions(repository):
            return
        sweep(repository)
        assert tree(repository) == {}
