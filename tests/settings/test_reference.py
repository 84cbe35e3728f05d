"""The Markdown table: every setting once, with the default that the code really has."""

from __future__ import annotations

import re

import pytest

from builders.settings import DeploySettings, ModelSettings
from builders.settings.reference import settings_table
from builders.settings.sections import Section
from tests.settings.test_sections import fields

TABLE = settings_table(DeploySettings)
ROWS = {
    cells[0].strip("`"): cells[1:]
    for cells in (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in TABLE.splitlines()[2:] if line
    )
}
LEAVES = {
    name: field
    for name, field in fields()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
}


def test_every_setting_has_one_row_of_four_cells() -> None:
    lines = TABLE.splitlines()
    assert lines[0] == "| setting | type | default | meaning |"
    assert len(lines) == 2 + len(LEAVES)
    assert set(ROWS) == set(LEAVES)
    assert all(len(cells) == 3 and all(cells) for cells in ROWS.values())


def test_default_in_the_table_is_the_default_of_the_code() -> None:
    tree = DeploySettings(model=ModelSettings(source="x"))
    for name in LEAVES:
        value: object = tree
        for part in name.split("."):
            value = getattr(value, part)
        shown = ROWS[name][1]
        if name == "model.source":
            assert shown == "required"
        elif isinstance(value, tuple):
            assert shown == f"`{list(value)}`"
        else:
            assert shown == f"`{'none' if value in (None, '') else value}`", name


def test_levels_show_their_own_defaults() -> None:
    assert ROWS["entry.interactive.timeout_ms"][1] == "`200.0`"
    assert ROWS["entry.background.timeout_ms"][1] == "`5000.0`"


def test_meaning_in_the_table_is_the_docstring() -> None:
    assert {name: cells[2] for name, cells in ROWS.items()} == {
        name: field.description for name, field in LEAVES.items()
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("entry.processes", "integer 1…64"),
        ("entry.window_ms", "number 0…600000"),
        ("objectives.accuracy_loss", "number 0…1"),
        ("engine.kind", r"`tensorrt` \| `onnxruntime`"),
        ("model.normalize", "true/false or none"),
        ("model.source", "text"),
        ("repository", "path"),
        ("buckets", "list of integer"),
        ("model.labels", "list of text or none"),
        ("model.prompts", "mapping of text to text"),
    ],
)
def test_type_and_bounds_shown(name: str, kind: str) -> None:
    assert ROWS[name][0].startswith(kind)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("model.max_tokens", "4…65536"), ("objectives.gpu_utilization", "0…1"), ("buckets", "1…65536")],
)
def test_bounds_of_optional_and_listed_numbers_shown(name: str, bounds: str) -> None:
    assert bounds in ROWS[name][0]


def test_excluded_bound_told_from_an_included_one() -> None:
    assert not ROWS["objectives.p99_ms"][0].startswith("number 0…")
