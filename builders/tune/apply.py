"""The chosen values written into the settings file; everything else in it stays, comments too."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.bench.driver import BenchError
from builders.settings import DeploySettings, load_deployments
from clients.load.page import BENCH_EXTRA

_ITEM = re.compile(r"^( *)- +\S", re.MULTILINE)


def apply_changes(config: Path, changes: Mapping[str, Any], name: str = "") -> None:
    """Writes values into a settings file: whole or not at all, and only if it then reads as intended.

    A file that `extends` another gets what differs from that one; the other is not touched. In a file of several
    models the values go to the item of the model.

    Args:
        config: the file.
        changes: dotted name -> value.
        name: of the model, where the file lists several.

    Raises:
        BenchError: ruamel.yaml is missing, the model is listed in another file, or the result would not read as
            intended.
        SettingsError: the result would be refused.
    """
    before = load_deployments(config)
    yaml, document = _opened(config)
    place = _place(document, name, config)
    for dotted, value in changes.items():
        _set(yaml, place, dotted.split("."), value)
    draft = config.with_name(f".{config.name}.tuned")
    try:
        with draft.open("w", encoding="utf-8") as file:
            yaml.dump(document, file)
        shutil.copymode(config, draft)
        _check(draft, before, changes, name)
        os.replace(draft, config)
    finally:
        draft.unlink(missing_ok=True)


def check_target(config: Path, name: str = "") -> None:
    """Whether values could be written there, to be asked before an hour of load and not after it.

    Raises:
        BenchError: ruamel.yaml is missing, the model is listed in another file, or the folder cannot be written.
    """
    _place(_opened(config)[1], name, config)
    if not os.access(config.absolute().parent, os.W_OK):
        raise BenchError("the settings file's folder cannot be written", value=str(config), remedy="leave --apply out")


def _opened(config: Path) -> tuple[Any, Any]:
    """A reader and writer that keeps what a person wrote, and the file's document."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        raise BenchError("ruamel.yaml is not installed", remedy=BENCH_EXTRA) from None
    text = config.read_text(encoding="utf-8")
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # no line is wrapped that was not
    if found := _ITEM.search(text):
        _indent(yaml, text, len(found[1]))
    return yaml, yaml.load(text)


def _indent(yaml: Any, text: str, offset: int) -> None:
    """Block lists keep the place of their dashes: below their key, or further in."""
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)


def _place(document: Any, name: str, config: Path) -> Any:
    if not name:
        return document
    items = document.get("models") or []
    found = next((item for item in items if item.get("name") == name), None)
    if found is None:
        raise BenchError(
            "the model is not listed in this settings file itself", value=name, limit=str(config),
            remedy="write the values into the file that lists it",
        )  # fmt: skip
    return found


def _set(yaml: Any, section: Any, path: list[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = yaml.map()
        section = section[parent]
    if not isinstance(value, list | tuple):
        section[last] = value
        return
    listed = yaml.seq(list(value))
    listed.fa.set_flow_style()
    section[last] = listed


def _check(draft: Path, before: Sequence[DeploySettings], changes: Mapping[str, Any], name: str) -> None:
    """Every model of the file: a YAML anchor may share a section among them."""
    after = [settings.model_dump() for settings in load_deployments(draft)]
    expected = [settings.model_dump() for settings in before]
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = next(one for one in expected if one["name"] == name)
        for parent in parents:
            section = section[parent]
        section[last] = value
    if after != expected:
        raise BenchError(
            "the settings file would not read as intended; it is left as it was", value=sorted(changes),
            remedy="write the values by hand",
        )  # fmt: skip
