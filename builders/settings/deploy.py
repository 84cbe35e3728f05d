"""The settings tree, its checks across fields, and the loader of deploy.yaml and the files that extend it."""

from __future__ import annotations

import difflib
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from builders.errors import SettingsError
from builders.settings.reference import field_kind
from builders.settings.sections import (
    EngineSettings,
    EntrySettings,
    LanesSettings,
    ModelSettings,
    ObjectiveSettings,
    Section,
    Tokens,
)


def _conflict(field: str, value: object, limit: str, remedy: str) -> PydanticCustomError:
    context = {"field": field, "value": str(value), "limit": limit, "remedy": remedy}
    return PydanticCustomError("conflict", "{field}: {value}; limit: {limit}; to do: {remedy}", context)


class DeploySettings(Section):
    """Everything deploy.yaml can say.

    Raises:
        pydantic.ValidationError: a value out of bounds, an unknown key or a combination that cannot work;
            `load_settings` turns it into a `SettingsError` that names field, value, limit and remedy.
    """

    model: ModelSettings
    """The encoder."""
    repository: Path = Path("model_repository")
    """Where the model repository is rendered and published, relative to the settings file's folder."""
    buckets: tuple[Tokens, ...] = Field(default=(128, 256, 512, 1024, 2048), min_length=1, max_length=32)
    """Lengths in tokens that texts are padded to, rising; each is one bucket model."""
    lanes: LanesSettings = LanesSettings()
    """Short and long lane."""
    entry: EntrySettings = EntrySettings()
    """The entry."""
    engine: EngineSettings = EngineSettings()
    """The engine of the bucket models."""
    objectives: ObjectiveSettings = ObjectiveSettings()
    """The service objectives."""

    @model_validator(mode="after")
    def _combination_works(self) -> DeploySettings:
        if any(a >= b for a, b in pairwise(self.buckets)):
            raise _conflict("buckets", list(self.buckets), "rising, none twice", f"write {sorted(set(self.buckets))}")
        if any(a >= b for a, b in pairwise(self.engine.batch_steps)) or self.engine.batch_steps[:1] != (1,):
            raise _conflict(
                "engine.batch_steps", list(self.engine.batch_steps), "rising from 1", "begin with 1 and sort"
            )
        self._check_lanes()
        self._check_batches()
        self._check_entry()
        return self

    def _check_lanes(self) -> None:
        short, long = self.lanes.short, self.lanes.long
        if long.above < short.up_to:
            raise _conflict(
                "lanes.long.above",
                long.above,
                f"not below lanes.short.up_to = {short.up_to}: the lanes overlap",
                f"set lanes.long.above to {short.up_to}",
            )
        orphans = [bucket for bucket in self.buckets if short.up_to < bucket <= long.above]
        if orphans:
            raise _conflict(
                "buckets",
                orphans,
                f"each in a lane: short up to {short.up_to}, long above {long.above}",
                f"set lanes.long.above to {short.up_to}, or drop those buckets",
            )
        if short.late_from is not None and short.late_from > short.up_to:
            raise _conflict(
                "lanes.short.late_from",
                short.late_from,
                f"at most lanes.short.up_to = {short.up_to}",
                "name a bucket of the short lane, or leave late_from out",
            )

    def _check_batches(self) -> None:
        for name, lane in (("short", self.lanes.short), ("long", self.lanes.long)):
            if lane.batch > self.engine.max_batch:
                raise _conflict(
                    f"lanes.{name}.batch",
                    lane.batch,
                    f"at most engine.max_batch = {self.engine.max_batch}",
                    "lower the lane's batch, or raise engine.max_batch and build the engines again",
                )
        if self.engine.max_batch_tokens < self.buckets[-1]:
            raise _conflict(
                "engine.max_batch_tokens",
                self.engine.max_batch_tokens,
                f"at least the longest bucket, {self.buckets[-1]}, so that it takes one text",
                "raise engine.max_batch_tokens or drop that bucket",
            )
        if self.lanes.long.bound < self.entry.batch and self.buckets[-1] > self.lanes.long.above:
            raise _conflict(
                "lanes.long.bound",
                self.lanes.long.bound,
                f"at least entry.batch = {self.entry.batch}: a full request of long texts could never be taken",
                f"set lanes.long.bound to {self.entry.batch} or more",
            )

    def _check_entry(self) -> None:
        for name, level in (("interactive", self.entry.interactive), ("background", self.entry.background)):
            if level.timeout_ms <= self.entry.window_ms:
                raise _conflict(
                    f"entry.{name}.timeout_ms",
                    level.timeout_ms,
                    f"above entry.window_ms = {self.entry.window_ms:g}, or every request waiting for a batch expires",
                    "raise the timeout or shorten the window",
                )
        if len(set(self.engine.gpus)) < len(self.engine.gpus):
            raise _conflict("engine.gpus", list(self.engine.gpus), "each GPU once", "remove what is named twice")
        if self.repository == Path():
            raise _conflict("repository", "", "a folder of its own", "name one, for example model_repository")
        if self.engine.kind == "onnxruntime" and self.engine.precision != "fp32":
            raise _conflict(
                "engine.precision",
                self.engine.precision,
                "fp32 with engine.kind onnxruntime: the CPU engine computes in nothing else",
                "set engine.precision to fp32",
            )


def load_settings(path: Path) -> DeploySettings:
    """Read a settings file, with the files it `extends` underneath it.

    A mapping is merged key by key, anything else (a list too) replaces what it overrides. `repository` and a
    folder named by `model.source` are taken relative to the file that names them.

    Args:
        path: the YAML file.

    Raises:
        SettingsError: the file is missing, is no mapping, extends itself, or holds a value that is refused.
    """
    merged = _merged(path, ())
    try:
        return DeploySettings.model_validate(merged)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise SettingsError(f"{path}:\n  " + "\n  ".join(lines)) from None


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
    base = document.pop("extends", None)
    _resolve(document, "repository", path.parent)
    model = document.get("model")
    if isinstance(model, dict) and not str(model.get("source")).startswith(("package:", "hub:")):
        _resolve(model, "source", path.parent)
    if base is None:
        document.setdefault("repository", str(path.parent / "model_repository"))
        return document
    return _merge(_merged(path.parent / str(base), (*above, path)), document)


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


def _explain(problem: Any) -> str:
    """One line for one pydantic problem: field, value, limit, remedy."""
    if problem["type"] == "conflict":
        return str(problem["msg"])
    location = tuple(part for part in problem["loc"] if isinstance(part, str) and part.isidentifier())
    name = ".".join(str(part) for part in problem["loc"])
    section, field = _field_of(location)
    if problem["type"] == "extra_forbidden":
        known = sorted([*section.model_fields, *(["extends"] if section is DeploySettings else [])])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        return f"{name}: {problem['input']!r}; limit: known keys are {', '.join(known)}; to do: {hint}"
    if problem["type"] == "missing":
        return f"{name}: missing; limit: required; to do: set it. {_about(section, field)}".rstrip()
    about = _about(section, field)
    kind = field_kind(section.model_fields[field]) if field in section.model_fields else ""
    limit = f"{problem['msg']}{f' ({kind})' if kind else ''}"
    return f"{name}: {problem['input']!r}; limit: {limit}; to do: correct it. {about}".rstrip()


def _about(section: type[Section], field: str | None) -> str:
    found = section.model_fields.get(field or "")
    return found.description or "" if found else ""


def _field_of(location: tuple[str, ...]) -> tuple[type[Section], str | None]:
    """The section class and the field a pydantic location points into."""
    section: type[Section] = DeploySettings
    for part in location:
        info = section.model_fields.get(part)
        if info is None:
            return section, None
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            section = info.annotation
            continue
        return section, part
    return section, None
