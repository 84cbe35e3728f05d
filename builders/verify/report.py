"""What a build leaves for people: report.json, and the same as one HTML page that needs nothing beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import TypeAdapter

from builders.errors import BuilderError
from builders.verify.bisect import BisectReport
from builders.verify.gate import GateReport

Section = Literal["steps", "sizes", "times", "gate", "memory"]

_NO_DATA: Mapping[Section, str] = MappingProxyType(
    {
        "steps": "this build applied no fusion or precision step",
        "sizes": "no file was written",
        "times": "no step was timed",
        "gate": "the accuracy gate was not run for this build",
        "memory": "no TensorRT plan was built, so no profile has a memory figure",
    }
)


@dataclass(frozen=True)
class StepRow:
    """One fusion or precision step."""

    name: str
    found: int | None
    """Sites found in the final graph; None for a step that has no sites (a precision)."""
    expected: int | None
    """Sites that the family's table asks for."""
    nodes_before: int
    nodes_after: int
    seconds: float
    note: str = ""
    """What the step said: which pattern it found instead, or that it left the plan unchanged."""


@dataclass(frozen=True)
class ProfileRow:
    """Memory of one optimisation profile."""

    bucket: int
    """Length, tokens."""
    batch: int
    """Largest batch, texts."""
    activation_bytes: int
    """Device memory of an execution context with this profile."""


@dataclass(frozen=True)
class BuildReport:
    """Everything that is known of a build; what is not known is empty, and `missing` says why."""

    model: str
    """Name of the model's folder."""
    model_sha256: str
    precision: str
    date: str
    """ISO 8601, UTC."""
    machine: str
    """CPU, GPU where there is one, and the versions that decide the result."""
    version: int | None = None
    """Published version; None when nothing was published."""
    steps: tuple[StepRow, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File or stage -> bytes, in the order they arose (exported graph, fused graph, plan)."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Step of the build -> seconds, in the order they ran (export, fuse, precision, compile, verify, publish)."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """Operator -> nodes of the final graph."""
    gate: GateReport | None = None
    bisect: BisectReport | None = None
    memory: tuple[ProfileRow, ...] = ()
    missing: Mapping[Section, str] = field(default_factory=dict)
    """Section -> why this build has no data for it."""

    def reason(self, section: Section) -> str:
        """Why a section has no data; empty when it has some."""
        return "" if getattr(self, section) else self.missing.get(section, _NO_DATA[section])

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `missing` holds a reason for every section without data."""
        document: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return document | {"missing": {name: self.reason(name) for name in _NO_DATA if self.reason(name)}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BuildReport:
        """The inverse of `to_json`.

        Raises:
            pydantic.ValidationError: the document is of another form.
        """
        return _ADAPTER.validate_python(document)


_ADAPTER = TypeAdapter(BuildReport)


class ReportError(BuilderError):
    """The report cannot be written."""


def write_report(folder: Path, report: BuildReport) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder, made if it is missing.

    The page is whole in itself: plots are inline SVG, no script, nothing is fetched.

    Returns:
        Both files.

    Raises:
        ReportError: Jinja2 or matplotlib is not installed, or the folder cannot be written.
    """
    try:
        from builders.verify.page import render_page
    except ImportError as error:
        raise ReportError(f"{error.name} is not installed", remedy="pip install 'encoder-lanes[build]'") from None
    page = render_page(report)
    data = json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    written = folder / "report.json", folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(written, (data, page), strict=True):
            draft = path.with_name(f".{path.name}.part")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    except OSError as error:
        raise ReportError(f"the report cannot be written ({error})", value=str(folder)) from None
    return written


def read_report(folder: Path) -> BuildReport:
    """The report that `write_report` left in a folder.

    Raises:
        ReportError: there is none, or it is of another form.
    """
    path = folder / "report.json"
    try:
        return BuildReport.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ReportError(f"no readable report ({error})", value=str(path), remedy="build again") from None
