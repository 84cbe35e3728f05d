"""What a model repository holds, read from its rendered config.pbtxt files; standard library alone.

The scripts of this folder run in the server's image, which has no package of this project.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


class LaunchError(Exception):
    """What happened, the value, the limit and what to do, in one line."""


@dataclass(frozen=True)
class Model:
    """One model that can be loaded.

    Attributes:
        name: its folder's name.
        is_entry: clients call it, and it calls the lanes: an entry, or an ensemble.
        processes: Python processes that Triton starts for one version of it; 0 for a native backend.
    """

    name: str
    is_entry: bool
    processes: int


def read_models(repository: Path) -> list[Model]:
    """The models of a repository that have a published version, by name.

    Raises:
        LaunchError: there is none, or no entry among them.
    """
    models = [
        _read(config)
        for config in sorted(repository.glob("*/config.pbtxt"))
        if any(folder.name.isdigit() for folder in config.parent.iterdir() if folder.is_dir())
    ]
    if not any(model.is_entry for model in models):
        raise LaunchError(
            f"{repository} holds no published version (models with one: {', '.join(m.name for m in models) or 'none'}):"
            " build first (docker compose run --rm builder), and mount what it wrote"
        )
    return models


def _read(config: Path) -> Model:
    text = config.read_text(encoding="utf-8")
    # Strings (the entry's own parameters are JSON) could hold anything; what is looked for stands outside of them.
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: found[0] if len(found[0]) < 40 else '""', text)
    processes = 0
    if re.search(r'^backend:\s*"python"', plain, re.MULTILINE):
        groups = re.findall(r"^instance_group\s*\{(.*?)^\}", plain, re.MULTILINE | re.DOTALL)
        processes = sum(_count(group) for group in groups) or 1
    # The parameter `entry` is the entry's own; Triton takes a platform for an ensemble alone.
    is_entry = re.search(r'^\s*key:\s*"entry"\s*$|^platform:\s*"ensemble"', plain, re.MULTILINE) is not None
    return Model(config.parent.name, is_entry, processes)


def _count(group: str) -> int:
    count = re.search(r"^\s*count:\s*(\d+)", group, re.MULTILINE)
    gpus = re.findall(r"^\s*gpus:\s*\d+", group, re.MULTILINE)
    return (int(count[1]) if count else 1) * max(1, len(gpus))
