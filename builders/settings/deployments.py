"""The loader of deploy.yaml and the files that extend it: one model, or a list of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from builders.errors import SettingsError
from builders.names import NAME
from builders.settings.deploy import DeploySettings, explain
from builders.settings.sections import ModelSettings

#: What an item of `models` may say besides its name; the rest belongs to the file.
ITEM_SECTIONS = ("model", "buckets", "lanes", "entry", "ensembles", "engine", "objectives")
_FORM = "{name: minilm, model: {source: …}}"


def load_deployments(path: Path) -> tuple[DeploySettings, ...]:
    """Read a settings file, with the files it `extends` underneath it.

    A mapping is merged key by key, anything else (a list too) replaces what it overrides. `repository` and a
    folder named by `model.source` are taken relative to the file that names them.

    A file describes one model (`model`) or several (`models`: a list of mappings, each with a `name` and a `model`).
    An item takes the file's other sections as its own; a section that it names itself is merged over the file's.

    Args:
        path: the YAML file.

    Returns:
        One per model, in the file's order; a model of the form `model` has no name.

    Raises:
        SettingsError: the file is missing, is no mapping, extends itself, or holds a value that is refused.
    """
    merged = _merged(path, ())
    if "models" not in merged:
        if "name" in merged:
            raise SettingsError(
                f"{path}: name: a file of one model has none", value=merged["name"],
                remedy="remove it, or list the model under `models`",
            )  # fmt: skip
        return (_validated(path, [("", merged)])[0],)
    return _validated(path, list(_items(path, merged)))


def read_document(path: Path) -> dict[str, Any]:
    """What a settings file says with the files it `extends` underneath it, paths resolved, values not checked yet.

    Raises:
        SettingsError: as `load_deployments`, but for values.
    """
    return _merged(path, ())


def load_settings(path: Path, name: str | None = None) -> DeploySettings:
    """The settings of one model.

    Args:
        path: as `load_deployments`.
        name: which one, where the file lists several; not needed where it describes one alone.

    Raises:
        SettingsError: as `load_deployments`; or there are several and none is named, or none of that name.
    """
    found = choose(path, load_deployments(path), name)
    if len(found) > 1:
        raise SettingsError(
            f"{path} describes several models, and this is done to one", limit=_listed(found),
            remedy=f"name it: --model {found[0].name}",
        )  # fmt: skip
    return found[0]


def choose(path: Path, models: tuple[DeploySettings, ...], name: str | None) -> tuple[DeploySettings, ...]:
    """The model of that name alone, or all of them without one.

    Raises:
        SettingsError: there is no such model.
    """
    if not name:
        return models
    found = tuple(model for model in models if model.name == name)
    if found:
        return found
    if models[0].name:
        raise SettingsError(f"{path} has no such model", value=name, limit=_listed(models), remedy="correct --model")
    raise SettingsError(f"{path} describes one model, which has no name", value=name, remedy="leave --model out")


def _listed(models: Iterable[DeploySettings]) -> str:
    return f"one of {', '.join(model.name for model in models)}"


def _items(path: Path, merged: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and whole document of every model of the list."""
    items, shared = merged["models"], {key: value for key, value in merged.items() if key != "models"}
    if not isinstance(items, list) or not items:
        raise SettingsError(f"{path}: models is no list of models", value=items, limit=f"- {_FORM}")
    seen: set[str] = set()
    for number, item in enumerate(items, start=1):
        where = f"{path}: models, item {number}"
        if not isinstance(item, dict):
            raise SettingsError(f"{where} is no mapping", value=item, limit=_FORM)
        name = item.get("name")
        # `_2` at its end: the monitoring rules would take the entry encode_bert_2 for a lane of 2 tokens.
        if not isinstance(name, str) or not re.fullmatch(NAME, name) or re.search(r"_[0-9]+$", name):
            raise SettingsError(
                f"{where}: this name cannot be one", value=name,
                limit="a to z, 0 to 9 and _, a letter first, no _<number> last, at most 64: it becomes encode_<name>",
                remedy="give it one, for example minilm",
            )  # fmt: skip
        if name in seen:
            raise SettingsError(f"{where}: the name is taken", value=name, remedy="give each model its own")
        seen.add(name)
        for key in sorted(map(str, item.keys() - {"name", *ITEM_SECTIONS})):
            remedy = "write it below `model`" if key in ModelSettings.model_fields else "correct or remove it"
            if key == "repository":
                remedy = "write it beside `models`: all models share it"
            raise SettingsError(
                f"{where} ({name}): no such section", value=key, limit=f"name, {', '.join(ITEM_SECTIONS)}",
                remedy=remedy,
            )  # fmt: skip
        yield name, _merge(shared, item)


def _validated(path: Path, documents: list[tuple[str, dict[str, Any]]]) -> tuple[DeploySettings, ...]:
    """Check every document; a problem that all of them have is in what they share and is told once."""
    models: list[DeploySettings] = []
    problems: dict[str, list[str]] = {}
    for name, document in documents:
        try:
            models.append(DeploySettings.model_validate(document))
        except ValidationError as error:
            for problem in error.errors():
                problems.setdefault(explain(problem), []).append(name)
    if problems:
        shared = len(documents) > 1
        lines = []
        for line, names in problems.items():
            everywhere = not names[0] or (shared and len(names) == len(documents))
            lines += [line] if everywhere else [f"models.{name}.{line}" for name in names]
        raise SettingsError(f"{path}:\n  " + "\n  ".join(lines)) from None
    return tuple(models)


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in above:
        raise SettingsError("settings files extend each other", value=str(path), remedy="remove one `extends`")
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise SettingsError(
            "no such settings file", value=str(path), remedy="name an existing file with --config"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or no date
        raise SettingsError(f"{path} cannot be read as YAML: {error}", remedy="correct the file") from None
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path} is no mapping", value=type(loaded).__name__, remedy="see deploy.yaml for the form")
    document: dict[str, Any] = loaded
    if "model" in document and "models" in document:
        raise SettingsError(
            f"{path} has `model` and `models`", remedy="describe one model with `model`, or list all under `models`"
        )
    base = document.pop("extends", None)
    _resolve(document, "repository", path.parent)
    items = document.get("models")
    for owner in (document, *(items if isinstance(items, list) else ())):
        model = owner.get("model") if isinstance(owner, dict) else None
        if isinstance(model, dict) and not str(model.get("source")).startswith(("package:", "hub:")):
            _resolve(model, "source", path.parent)
    if base is None:
        document.setdefault("repository", str(path.parent / "model_repository"))
        return document
    below = _merged(path.parent / str(base), (*above, path))
    # A list of models takes the place of the one below, and the other way round: nothing of one model is right for
    # another by chance.
    if "models" in document:
        below.pop("model", None)
    elif "model" in document:
        below.pop("models", None)
    return _merge(below, document)


def _resolve(section: dict[str, Any], key: str, folder: Path) -> None:
    """Take a path relative to the file that names it; what is no path is left for the check of its type."""
    if isinstance(section.get(key), str) and section[key]:
        section[key] = str(folder / Path(section[key]).expanduser())


class _Loader(yaml.SafeLoader):
    """YAML without objects and without a key that is given twice, of which YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.value[number][0].start_mark
                )
        return super().construct_mapping(node, deep)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        result[key] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result
