"""Checks a dashboard against Grafana's own schema, as the types of the Grafana Foundation SDK state it.

The SDK's `from_json` drops what it does not know and checks no type. So a dashboard is read and written again: what is
not there any more is no field of Grafana's. And each value is compared with the type that its field is declared with.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def problems(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a dashboard; empty when nothing is."""
    register_default_plugins()
    read = Dashboard.from_json(dict(document))
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    return [*_lost(document, written, "dashboard"), *_wrong(read, Dashboard, "dashboard")]


def _lost(given: Any, kept: Any, place: str) -> Iterator[str]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(kept, Mapping) or key not in kept:
                yield f"{place}.{key}: unknown to Grafana"
            else:
                yield from _lost(value, kept[key], f"{place}.{key}")
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            yield f"{place}: {len(given)} items given, not all of them kept"
            return
        for number, (mine, theirs) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(mine, theirs, f"{place}[{number}]")
    elif given != kept:
        yield f"{place}: {given!r} became {kept!r}"


def _wrong(value: Any, declared: Any, place: str) -> Iterator[str]:
    if _fits(value, declared):
        yield from _inside(value, declared, place)
    else:
        yield f"{place}: {value!r} is no {declared}"


def _inside(value: Any, declared: Any, place: str) -> Iterator[str]:
    """Problems of what a value of the right kind holds."""
    if isinstance(value, list):
        inner = [one for one in _options(declared) if typing.get_origin(one) is list]
        for number, item in enumerate(value):
            if inner:
                yield from _wrong(item, typing.get_args(inner[0])[0], f"{place}[{number}]")
    elif type(value).__module__.startswith("grafana_foundation_sdk.") and not isinstance(value, enum.Enum):
        hints = typing.get_type_hints(type(value))
        for name, held in vars(value).items():
            if name in hints:
                yield from _wrong(held, hints[name], f"{place}.{name}")


def _options(declared: Any) -> tuple[Any, ...]:
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return tuple(option for one in typing.get_args(declared) for option in _options(one))
    return (declared,)


def _fits(value: Any, declared: Any) -> bool:
    return any(_fits_one(value, option) for option in _options(declared))


def _fits_one(value: Any, option: Any) -> bool:
    origin = typing.get_origin(option)
    if option in (typing.Any, object):
        return True
    if origin is typing.Literal:
        return value in typing.get_args(option)
    if origin in (list, dict):
        return isinstance(value, origin)
    if not isinstance(option, type):
        return True
    if issubclass(option, enum.Enum):
        # The SDK keeps an enumeration's value as it was read.
        return value in [member.value for member in option]
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option)
