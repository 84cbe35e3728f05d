"""Every field: documented, bounded, and refused with field, value, limit and remedy in one line."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from builders.errors import SettingsError
from builders.settings import DeploySettings, load_settings
from builders.settings.sections import Section


def fields(section: type[Section] = DeploySettings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from fields(field.annotation, f"{prefix}{name}.")


def bound_rules(field: FieldInfo) -> list[Any]:
    """Rules of the field itself, and of the number inside `Annotated[...] | None` or `tuple[Annotated[...], ...]`."""
    found = list(field.metadata)
    for argument in typing.get_args(field.annotation):
        found += [rule for item in getattr(argument, "__metadata__", ()) for rule in (item, *item_rules(item))]
    return found


def item_rules(item: object) -> list[Any]:
    return list(getattr(item, "metadata", ()))


def out_of_bounds() -> Iterator[tuple[str, int | float]]:
    for name, field in fields():
        for rule in bound_rules(field):
            if getattr(rule, "ge", None) is not None:
                yield name, rule.ge - 1
            if getattr(rule, "gt", None) is not None:
                yield name, rule.gt
            if getattr(rule, "le", None) is not None:
                yield name, rule.le + 1


OUT_OF_BOUNDS = sorted(set(out_of_bounds()))


def refusal(folder: Path, name: str, value: object) -> str:
    """The message for one wrong value, the rest being as good as can be."""
    document: dict[str, Any] = {"model": {"source": "package:any/model"}}
    own = value
    if name in ("buckets", "engine.gpus", "engine.batch_steps", "model.dimensions", "ensembles.buckets"):
        own = [value]
    if name.startswith(("entry.interactive.", "entry.background.")):
        document["entry"] = {name.split(".")[1]: {"timeout_ms": 100, "queue_size": 10}}
    place = document
    *above, last = name.split(".")
    for part in above:
        place = place.setdefault(part, {})
    place[last] = own
    file = folder / "deploy.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    return str(caught.value)


def test_bounds_are_found_when_the_tree_is_walked() -> None:
    names = {name for name, _ in OUT_OF_BOUNDS}
    assert {
        "model.max_tokens",
        "lanes.short.late_from",
        "entry.interactive.timeout_ms",
        "objectives.gpu_utilization",
        "buckets",
        "engine.batch_steps",
        "engine.gpus",
    } <= names
    assert len(names) >= 30


def test_every_number_is_bounded_on_both_sides() -> None:
    numeric = [
        (name, field)
        for name, field in fields()
        if field.annotation in (int, float) or {int, float} & set(_inside(field.annotation))
    ]
    assert len(numeric) >= 30
    for name, field in numeric:
        rules = bound_rules(field)
        assert any(getattr(rule, "ge", getattr(rule, "gt", None)) is not None for rule in rules), f"{name}: no lower"
        assert any(getattr(rule, "le", None) is not None for rule in rules), f"{name}: no upper"


def _inside(annotation: Any) -> list[Any]:
    return [getattr(part, "__origin__", part) for part in typing.get_args(annotation)]


@pytest.mark.parametrize(("name", "value"), OUT_OF_BOUNDS)
def test_number_out_of_bounds_refused_with_field_value_limit_and_remedy(
    name: str, value: float, tmp_path: Path
) -> None:
    message = refusal(tmp_path, name, value)
    field = dict(fields())[name]
    limits = [
        getattr(rule, key)
        for rule in bound_rules(field)
        for key in ("ge", "gt", "le")
        if getattr(rule, key, None) is not None
    ]
    line = next(line for line in message.splitlines() if line.strip().startswith(name))
    assert str(value) in line
    assert "limit: Input should be" in line
    assert any(f"than or equal to {limit} (" in line or f"than {limit} (" in line for limit in limits)
    assert "to do: " in line
    assert str(field.description) in line


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("engine.kind", "openvino", "'tensorrt' or 'onnxruntime'"),
        ("engine.precision", "fp8", "'fp16', 'bf16', 'fp32' or 'int8'"),
        ("lanes.short.stream_priority", "highest", "'max', 'default' or 'min'"),
        ("model.task", "rerank", "'reranking'"),
        ("model.pooling", "middle", "'auto', 'mean', 'cls', 'max'"),
        ("model.prompts", "query", "valid dictionary"),
        ("model.labels", "yes", "valid tuple"),
        ("model.normalize", "perhaps", "valid boolean"),
        ("entry.processes", "many", "valid integer"),
        ("entry.processes", 2.5, "valid integer"),
        ("entry.window_ms", "soon", "valid number"),
        ("entry.window_ms", float("nan"), "less than or equal to 600000"),
        ("objectives.p99_ms", float("inf"), "less than or equal to 600000"),
        ("model.source", 7, "valid string"),
    ],
)
def test_wrong_kind_of_value_refused_with_what_is_allowed(name: str, value: object, limit: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, name, value)
    assert f"{name}: {value!r}" in message
    assert limit in message.partition("limit: ")[2]
    assert "to do: " in message
    assert str(dict(fields())[name].description) in message


@pytest.mark.parametrize("name", ["entry.processes", "lanes.short.batch", "entry.window_ms"])
def test_boolean_refused_where_a_number_belongs(name: str, tmp_path: Path) -> None:
    assert name in refusal(tmp_path, name, True)


def test_every_field_has_a_docstring_of_one_line() -> None:
    for name, field in fields():
        assert field.description, f"{name} has no docstring"
        assert field.description.endswith("."), f"{name}: {field.description}"
        assert "\n" not in field.description, f"{name} spans lines"


def test_every_duration_names_its_unit() -> None:
    durations = [(name, field) for name, field in fields() if name.endswith("_ms")]
    assert len(durations) >= 7
    for name, field in durations:
        assert any(word in str(field.description) for word in ("milliseconds", " ms")), name


def test_settings_refuse_a_change_when_made() -> None:
    settings = DeploySettings.model_validate({"model": {"source": "package:any/model"}})
    with pytest.raises(ValidationError, match="frozen"):
        settings.entry.processes = 2  # type: ignore[misc]
