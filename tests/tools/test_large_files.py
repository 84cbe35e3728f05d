"""The plugin in a session of its own: what is removed when, and what stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.repositories import ROOT

RUN = "import sys, pytest; from tests.tools.large_files import LargeFiles as L; sys.exit(pytest.main(plugins=[L()]))"
MAKING = """
import pytest

def fill(folder):
    folder.mkdir(exist_ok=True)
    (folder / "small").write_text("said")
    for name in ("model", "server.log", "log"):
        (folder / name).write_bytes(bytes(5 << 20))
    return folder
"""


Run = Callable[..., dict[str, list[str]]]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Run]:
    """Runs tests, with how long pyproject.toml lets pytest keep folders.

    Gives the files that are left in each folder that holds no other, by its path below the folder of that session.
    """
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    kept = "".join(f"{name} = {value}\n" for name, value in options.items() if name.startswith("tmp_path_retention"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider\n{kept}", encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(tmp_path / "root")}
    (tmp_path / "root").mkdir()

    def run(number: int = 0, **files: str) -> dict[str, list[str]]:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        print(ran.stdout, ran.stderr)
        (base,) = (tmp_path / "root").glob(f"pytest-of-*/pytest-{number}")
        return {
            Path(place).relative_to(base).as_posix(): sorted(set(names) - {".lock"})
            for place, folders, names in os.walk(base)
            if place != str(base) and (names or all(os.path.islink(os.path.join(place, below)) for below in folders))
        }

    yield run
    shutil.rmtree(tmp_path / "root")


ALL, NO_MODEL = ["log", "model", "server.log", "small"], ["log", "server.log", "small"]

FIXTURES = f"""{MAKING}
@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("kept"))

@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    # A wider fixture that is made meanwhile is not this one's.
    request.getfixturevalue("kept")
    return fill(tmp_path_factory.mktemp("made") / "below")

@pytest.fixture(scope="module")
def served(made):
    yield made
    assert (made / "model").exists(), "its teardown needs it"
"""
FIRST = """
def test_first(served):
    assert (served / "model").exists()

def test_second(served, kept):
    assert (served / "model").exists() and (kept / "model").exists()
"""
SECOND = """
def test_third(tmp_path_factory, kept):
    old = tmp_path_factory.getbasetemp() / "made0" / "below"
    assert sorted(path.name for path in old.iterdir()) == ["log", "server.log", "small"]
    assert (kept / "model").exists()
"""


def test_large_files_go_with_their_fixture_and_small_ones_and_logs_stay(
    session: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    left = session(conftest=FIXTURES, test_a=FIRST, test_b=SECOND)
    assert "3 passed" in capfd.readouterr().out
    assert left == {"kept0": NO_MODEL, "made0/below": NO_MODEL}


def test_a_passed_tests_own_folder_goes_but_for_its_logs(session: Run) -> None:
    own = """
import pytest
from conftest import fill

def test_logs(tmp_path):
    fill(tmp_path / "below")
    (tmp_path / "link").symlink_to(tmp_path / "below")

def test_other(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "small").write_text("said")

@pytest.mark.xfail(strict=True)
def test_expected(tmp_path):
    (tmp_path / "small").write_text("said")
    assert False
"""
    assert session(conftest=MAKING, test_a=own) == {"test_logs0/below": ["log", "server.log"]}


def test_all_stays_when_a_setup_a_test_or_a_teardown_failed(session: Run, capfd: pytest.CaptureFixture[str]) -> None:
    own = """
import pytest
from conftest import fill

@pytest.fixture
def starts(tmp_path):
    fill(tmp_path)
    raise RuntimeError("it did not start")

@pytest.fixture
def ends(tmp_path):
    yield
    fill(tmp_path)
    raise RuntimeError("it did not end")

def test_setup(starts):
    pass

def test_teardown(ends):
    pass

def test_call(tmp_path):
    fill(tmp_path)
    assert False

def test_passes(tmp_path):
    fill(tmp_path)
"""
    left = session(conftest=MAKING, test_a=own)
    assert "1 failed, 2 passed, 2 errors" in capfd.readouterr().out
    assert left == {
        **{"test_setup0": ALL, "test_teardown0": ALL, "test_call0": ALL},
        "test_passes0": ["log", "server.log"],
    }


def test_a_shared_fixture_keeps_all_when_one_of_its_tests_failed_and_another_does_not(session: Run) -> None:
    failing = """
def test_first(served):
    assert False

def test_second(served):
    pass
"""
    left = session(conftest=FIXTURES, test_a=failing, test_b="def test_third(made):\n    pass\n")
    # The first module's, and the session's that it asked for by name alone.
    assert left == {"kept0": ALL, "made0/below": ALL, "made1/below": NO_MODEL}


def test_a_shared_fixture_keeps_all_when_its_teardown_failed(session: Run) -> None:
    ending = f"""{MAKING}
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("made"))

@pytest.fixture(scope="module")
def ends(folder):
    yield
    raise RuntimeError("it did not end")
"""
    # The report of the teardown is that of another test, which does not use it.
    tests = "def test_first(ends):\n    pass\n\ndef test_second():\n    pass\n"
    assert session(conftest=ending, test_a=tests) == {"made0": ALL}


def test_what_a_wider_fixtures_factory_makes_in_a_narrower_setup_is_not_the_narrower_ones(
    session: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    factory = f"""{MAKING}
@pytest.fixture(scope="session")
def made_of(tmp_path_factory):
    kept = {{}}

    def get(name):
        if name not in kept:
            kept[name] = fill(tmp_path_factory.mktemp(name))
        return kept[name]

    return get

@pytest.fixture
def bert(made_of):
    return made_of("bert")
"""
    tests = "".join(f"def test_{n}(bert):\n    assert (bert / 'model').exists()\n\n" for n in ("one", "two"))
    assert session(conftest=factory, test_a=tests) == {"bert0": ALL}
    assert "2 passed" in capfd.readouterr().out


def test_evidence_stays_when_another_session_follows(session: Run, tmp_path: Path) -> None:
    """`make test` has two."""
    failing = "from conftest import fill\n\ndef test_fails(tmp_path):\n    fill(tmp_path)\n    assert False\n"
    assert session(conftest=MAKING, test_a=failing) == {"test_fails0": ALL}
    assert session(1, test_a="def test_passes(tmp_path):\n    pass\n") == {}
    (folder,) = (tmp_path / "root").glob("pytest-of-*/pytest-0/test_fails0")
    assert sorted(path.name for path in folder.iterdir()) == ALL
