"""The settings tree of one model, and its checks across fields."""

from __future__ import annotations

import difflib
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from builders.names import entry_model, lane_model
from builders.settings.reference import field_kind
from builders.settings.sections import (
    EngineSettings,
    EnsemblesSettings,
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

    name: str = ""
    """Name of this model where the file lists several (`models`); its entry is `encode_<name>`."""
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
    ensembles: EnsemblesSettings = EnsemblesSettings()
    """Declarative ensembles beside the entry."""
    engine: EngineSettings = EngineSettings()
    """The engine of the bucket models."""
    objectives: ObjectiveSettings = ObjectiveSettings()
    """The service objectives."""

    @property
    def entry_model(self) -> str:
        """The Triton model that clients call: `encode`, or `encode_<name>`."""
        return entry_model(self.name)

    def lane_model(self, length: int) -> str:
        """The Triton model of a bucket: `encoder_<length>`, or `encoder_<name>_<length>`."""
        return lane_model(self.name, length)

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
        self._check_ensembles()
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
        techniques = EngineSettings().techniques
        if self.engine.techniques != techniques[: len(self.engine.techniques)]:
            raise _conflict(
                "engine.techniques",
                list(self.engine.techniques),
                f"the first ones of {list(techniques)}: each needs those before it",
                "add what is missing or drop what follows",
            )
        self._check_degrade()
        if len(set(self.engine.gpus)) < len(self.engine.gpus):
            raise _conflict("engine.gpus", list(self.engine.gpus), "each GPU once", "remove what is named twice")
        if self.repository == Path():
            raise _conflict("repository", "", "a folder of its own", "name one, for example model_repository")
        if self.engine.kind == "onnxruntime" and self.engine.precision not in ("fp32", "int8"):
            raise _conflict(
                "engine.precision",
                self.engine.precision,
                "fp32 or int8 with engine.kind onnxruntime: the CPU engine computes in nothing else",
                "set engine.precision to fp32",
            )
        if self.engine.kind == "tensorrt" and self.engine.precision == "int8":
            raise _conflict(
                "engine.precision",
                self.engine.precision,
                "fp16, bf16 or fp32 with engine.kind tensorrt: int8 is the CPU engine's",
                "set engine.precision to fp16",
            )

    def _check_ensembles(self) -> None:
        wanted = list(self.ensembles.buckets)
        if any(a >= b for a, b in pairwise(wanted)):
            raise _conflict("ensembles.buckets", wanted, "rising, none twice", f"write {sorted(set(wanted))}")
        strange = [bucket for bucket in wanted if bucket not in self.buckets]
        if strange:
            raise _conflict(
                "ensembles.buckets",
                strange,
                f"some of `buckets`: {list(self.buckets)}, whose engine they share",
                "correct them, or add them to buckets and build the engines again",
            )

    def _check_degrade(self) -> None:
        degrade, most = self.entry.degrade, self.entry.interactive.queue_size + self.entry.background.queue_size
        if not degrade.enabled:
            return
        if not degrade.below < degrade.above:
            raise _conflict(
                "entry.degrade.below",
                degrade.below,
                f"less than entry.degrade.above = {degrade.above}, or it would switch to and fro",
                f"set entry.degrade.below to {degrade.above // 4}",
            )
        if degrade.above > most:
            raise _conflict(
                "entry.degrade.above",
                degrade.above,
                f"at most {most}, the queue sizes of both levels: more requests never wait",
                "lower entry.degrade.above",
            )
        if degrade.batch >= self.entry.batch:
            raise _conflict(
                "entry.degrade.batch",
                degrade.batch,
                f"less than entry.batch = {self.entry.batch}, or nothing would change",
                "lower entry.degrade.batch",
            )


def explain(problem: Any) -> str:
    """One line for one pydantic problem of `DeploySettings`: field, value, limit, remedy."""
    if problem["type"] == "conflict":
        return str(problem["msg"])
    location = tuple(part for part in problem["loc"] if isinstance(part, str) and part.isidentifier())
    name = ".".join(str(part) for part in problem["loc"])
    section, field = _field_of(location)
    if problem["type"] == "extra_forbidden":
        known = sorted(section.model_fields)
        if section is DeploySettings:
            known = sorted({*known, "extends", "models"} - {"name"})
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
