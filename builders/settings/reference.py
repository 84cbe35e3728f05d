"""The settings as a Markdown table, made from the same classes that check deploy.yaml."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from builders.settings.sections import Section


def settings_table(section: type[Section]) -> str:
    """A table of every field below `section`: name, type and bounds, default, meaning."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {default} | {about} |" for name, kind, default, about in _rows(section, None, "")]
    return "\n".join(lines) + "\n"


def _rows(section: type[Section], instance: object, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a section; `instance` is the parent's own default for it, which wins over the section's defaults."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        own = field.default if instance is None else getattr(instance, name)
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _rows(annotation, None if own is PydanticUndefined else own, f"{prefix}{name}.")
            continue
        default = "required" if own is PydanticUndefined else f"`{_plain(own)}`"
        yield f"{prefix}{name}", field_kind(field).replace("|", "\\|"), default, field.description or ""


def field_kind(field: FieldInfo) -> str:
    """A field's type and bounds in words: `integer 1…64`."""
    annotation = field.annotation
    return _kind(annotation, [] if typing.get_origin(annotation) is tuple else field.metadata)


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else "none" if value in (None, "") else str(value)


def _kind(annotation: Any, rules: Iterable[Any] = ()) -> str:
    """A type in words, with its bounds where it has some."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0], [*rules, *_rules(arguments[1:])])
    if origin is typing.Literal:
        return " | ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else _kind(part, rules) for part in arguments)
    if origin is dict:
        return f"mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    names = {"int": "integer", "float": "number", "str": "text", "bool": "true/false", "Path": "path"}
    name: str = annotation.__name__
    return names.get(name, name) + _bounds(rules)


def _rules(metadata: Iterable[Any]) -> Iterator[Any]:
    """The single constraints inside what `Annotated` carries."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _bounds(rules: Iterable[Any]) -> str:
    bounds = {
        name: value for rule in rules for name in ("ge", "gt", "le") if (value := getattr(rule, name, None)) is not None
    }
    low = f">{bounds['gt']}" if "gt" in bounds else str(bounds.get("ge", ""))
    return f" {low}…{bounds['le']}" if low and "le" in bounds else ""
