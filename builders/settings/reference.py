"""The settings as a Markdown table, made from the same classes that check deploy.yaml."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
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
        yield f"{prefix}{name}", _kind(annotation) + _bounds(field), default, field.description or ""


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else "none" if value is None else str(value)


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else _kind(part) for part in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    name: str = annotation.__name__
    return {"int": "integer", "float": "number", "str": "text", "bool": "true/false", "Path": "path"}.get(name, name)


def _bounds(field: FieldInfo) -> str:
    low = next(
        (
            f"{getattr(rule, 'ge', getattr(rule, 'gt', None))}"
            for rule in field.metadata
            if getattr(rule, "ge", getattr(rule, "gt", None)) is not None
        ),
        None,
    )
    high = next((f"{rule.le}" for rule in field.metadata if getattr(rule, "le", None) is not None), None)
    return f" {low}…{high}" if low and high else ""
