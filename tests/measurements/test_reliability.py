"""docs/reliability.md: every test, file and script that it names is there."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.tools.repositories import ROOT

TESTS = ROOT / "tests"
INTEGRATION = TESTS / "integration"
QUOTED = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))


def functions() -> set[str]:
    """Names of all test functions."""
    found = set()
    for file in TESTS.rglob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


def test_every_named_test_exists() -> None:
    named = {name for name in QUOTED if re.fullmatch(r"(test|…)_\w+…?", name)}
    assert len(named) > 40
    there = functions()
    patterns = {name: name.replace("…", "*") for name in named}
    assert [name for name, pattern in patterns.items() if not any(fnmatchcase(one, pattern) for one in there)] == []


def test_every_named_file_exists() -> None:
    named = {name for name in QUOTED if re.fullmatch(r"[\w/]+\.py", name)}
    assert len(named) > 10
    assert [name for name in named if not any((folder / name).is_file() for folder in (ROOT, TESTS, INTEGRATION))] == []


@pytest.mark.parametrize("script", sorted({name for name in QUOTED if re.fullmatch(r"measurements\.\w+", name)}))
def test_every_named_script_exists(script: str) -> None:
    assert (TESTS / Path(*script.split("."))).with_suffix(".py").is_file()
