"""A plugin of pytest: models and engines of what passed go with its fixtures, not with the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

#: In the folder of a fixture of several tests what is smaller stays, bytes.
LARGE = 4 << 20


class LargeFiles:
    """Notes the folders that fixtures make; empties them when the fixture has ended and none of its tests failed.

    A folder of one test, such as `tmp_path`, loses everything, one of several tests its large files, and none its logs.
    As it was stays the folder of a fixture that a failed test used, or that a failed setup or teardown did: also where
    it is another fixture that failed. pytest itself keeps all to the end of the session and longer: copies of models
    add up to gigabytes by then.

    A folder is its fixture's that itself asks for `tmp_path_factory`. What is made later with a factory that a fixture
    gives, in a test or in the setup of another fixture, may be used to the session's end, and stays.
    """

    def __init__(self) -> None:
        self._setting_up: list[pytest.FixtureDef[Any]] = []
        self._folders: dict[pytest.FixtureDef[Any], list[Path]] = {}
        self._ended: list[tuple[Path, int]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Know whose folder is made."""
        self._setting_up.append(fixturedef)
        try:
            result = yield
        finally:
            self._setting_up.pop()
        if fixturedef.argname == "tmp_path_factory":
            result.mktemp = self._noting(result.mktemp)
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """After its own teardown, and that of all that use it; whether that failed the report says."""
        above = -1 if fixturedef.scope == "function" else LARGE
        self._ended += [(folder, above) for folder in self._folders.pop(fixturedef, ())]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """After a setup, a test, a teardown: empty what has ended with it, or leave alone what a failure used."""
        report = yield
        if not report.failed:
            for folder, above in self._ended:
                empty(folder, above)
        else:
            # With those that were asked for by name alone, which `item.fixturenames` lacks.
            used = set(getattr(item, "_request", item).fixturenames)
            self._folders = {fixture: made for fixture, made in self._folders.items() if fixture.argname not in used}
        self._ended.clear()
        return report

    def _noting(self, mktemp: Callable[..., Path]) -> Callable[..., Path]:
        @wraps(mktemp)
        def noted(*arguments: Any, **options: Any) -> Path:
            folder = mktemp(*arguments, **options)
            if self._setting_up and "tmp_path_factory" in self._setting_up[-1].argnames:
                self._folders.setdefault(self._setting_up[-1], []).append(folder)
            return folder

        return noted


def empty(folder: Path, above: int) -> None:
    """Remove files below a folder, of a hard link this name alone, and never a log (`log`, `*.log`).

    Args:
        folder: what others have removed meanwhile is no error.
        above: files of more bytes go; with -1 all, and folders that are empty then.
    """
    with suppress(OSError):
        for found in list(os.scandir(folder)):
            with suppress(OSError):
                if found.is_dir(follow_symlinks=False):
                    empty(Path(found), above)
                elif not f".{found.name}".endswith(".log") and found.stat(follow_symlinks=False).st_size > above:
                    os.unlink(found)
        if above < 0:
            folder.rmdir()
