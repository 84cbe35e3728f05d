"""A build that is killed at any point leaves the repository as it was, or with the whole version."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from builders.manifest import check_complete, published_versions, read_manifest
from builders.publish import publish_version, sweep
from tests.builders.test_publish import LENGTHS, contents, is_complete, parts, plan, staging, tree

KILLS = 20
#: For each line with a repository, a folder and a number: publishes into the repository from a process that kills
#: itself before that one of the calls that change files (0: never), and says how it ended. The process is forked off
#: one that has imported everything: 20 Pythons would take most of the time.
PUBLISHER = """
import os, shutil, signal, sys, traceback
from pathlib import Path
from builders.publish import publish_version
from tests.builders.test_publish import LENGTHS, parts, plan

def publish(repository, folder, point):
    made = 0

    def hooked(real):
        def call(*args, **options):
            nonlocal made
            made += 1
            if made == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call

    version = parts(Path(folder), "new")
    for name in ("mkdir", "rmdir", "replace", "link", "unlink", "fsync", "open"):
        setattr(os, name, hooked(getattr(os, name)))
    shutil.copyfile = hooked(shutil.copyfile)
    publish_version(Path(repository), plan(*LENGTHS), version)
    return made

for line in sys.stdin:
    repository, folder, point = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        try:
            print("calls", publish(repository, folder, int(point)), flush=True)
            os._exit(0)
        except BaseException:
            print(traceback.format_exc(), flush=True)
            os._exit(1)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the children do wait."""
    monkeypatch.setattr("builders.publish._sync_file", lambda path: None)


@dataclass(frozen=True)
class Ended:
    """How a publishing process ended: its exit code, and what it printed."""

    returncode: int
    output: str


Publish = Callable[[Path, Path, int], Ended]


@pytest.fixture(scope="module")
def publish_in_child() -> Iterator[Publish]:
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as publisher:  # fmt: skip
        told, said = publisher.stdin, publisher.stdout
        assert told
        assert said

        def publish(repository: Path, made: Path, point: int) -> Ended:
            told.write(f"{repository}\t{made}\t{point}\n")
            told.flush()
            lines: list[str] = []
            for line in said:
                if line.startswith("ended "):
                    return Ended(int(line.split()[1]), "".join(lines))
                lines.append(line)
            raise AssertionError("".join(lines))

        yield publish
        told.close()


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
def calls(publish_in_child: Publish, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Calls that a whole publication makes."""
    folder = tmp_path_factory.mktemp("whole")
    repository, _ = prepared(folder / "a")
    done = publish_in_child(repository, folder / "new", 0)
    assert done.returncode == 0, done.output
    assert one_whole_version(repository, 2)
    return int(done.output.removeprefix("calls "))


def test_repository_whole_when_the_build_is_killed_at_twenty_random_points(
    publish_in_child: Publish, tmp_path: Path, calls: int
) -> None:
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
        assert done.returncode == -signal.SIGKILL, (point, done.output)
        # Nothing of version 1 changed, and version 2 is there whole or is not named by anything.
        assert {name: data for name, data in contents(repository).items() if name in before} == before, point
        new = published_versions(repository) == (1, 2)
        committed += new
        assert not new or one_whole_version(repository, 2), point
        if number % 4 == 0:
            # The sweep is killed as well, early: it is finished by the next build.
            again = publish_in_child(repository, tmp_path / str(number) / "new", chance.randint(1, 12))
            assert again.returncode == -signal.SIGKILL, (point, again.output)
        sweep(repository)
        assert not staging(repository)
        if not new:
            assert contents(repository) == before, point
        expected = 3 if new else 2
        assert publish_version(repository, plan(*LENGTHS), parts(tmp_path / str(number) / "new")) == expected
        assert one_whole_version(repository, expected), point
    print(f"{committed} of {KILLS} were whole")


def test_empty_repository_empty_again_when_the_first_build_is_killed_between_two_moves(
    publish_in_child: Publish, tmp_path: Path, calls: int
) -> None:
    repository = tmp_path / "r"
    for point in range(calls - 45, calls - 30, 5):
        done = publish_in_child(repository, tmp_path / "new", point)
        assert done.returncode == -signal.SIGKILL
        if published_versions(repository):
            return
        sweep(repository)
        assert tree(repository) == {}
