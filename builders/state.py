"""What is served: a small git-ignored file per model in the repository that render reads and a restart keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from builders.errors import StateError
from builders.manifest import published_versions
from builders.names import entry_model, of_model, own_file


class Candidate(BaseModel):
    """A version on trial, and the lease that its command renews (`builders/serving/entry/candidate.py` reads it)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    version: int = Field(ge=1)
    """The version."""
    share: float = Field(gt=0, le=0.5)
    """The share of the requests that it answers."""
    until: float
    """End of the lease, seconds since 1970."""
    deadline_s: float = Field(gt=0)
    """Longest that it may take for an answer, seconds; then the served version gives it."""
    entry: dict[str, Any]
    """Parameters of its entry, as `entry_parameters` writes them."""


class Served(BaseModel):
    """What one entry serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    served: int = Field(ge=1)
    """The version that answers."""
    previous: int | None = Field(default=None, ge=1)
    """The version that `rollback` goes back to."""
    lanes: tuple[int, ...]
    """Versions whose lanes are loaded, rising; the served one is among them. A version on trial is not."""
    candidate: Candidate | None = None
    """A version on trial; also after its lease has ended, when its command died."""

    @model_validator(mode="after")
    def _lanes_hold_the_served(self) -> Served:
        if self.served not in self.lanes or list(self.lanes) != sorted(set(self.lanes)):
            raise ValueError("lanes must rise and hold the served version")
        return self


class _State(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    entries: dict[str, Served]


def state_file(name: str = "") -> str:
    """The file of one model: `.served.json`, `.served.minilm.json`. None is shared, so none can be torn."""
    return own_file(name, "served", ".json")


def read_state(repository: Path, name: str = "") -> Served | None:
    """What a model serves, or None where nobody has served or promoted it yet.

    Raises:
        StateError: the file cannot be read.
    """
    path = repository / state_file(name)
    remedy = f"restore the file, or remove it: then version {_newest(repository, name)}, the newest, is served"
    try:
        state = _State.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StateError(f"{path}: {where + ': ' if where else ''}{first['msg']}", remedy=remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path} cannot be read: {error}", remedy=remedy) from None
    return state.entries.get(entry_model(name))


def write_state(repository: Path, served: Served, name: str = "") -> None:
    """Write it whole or not at all.

    Raises:
        StateError: the repository cannot be written.
    """
    entry = entry_model(name)
    # Without a trial not a word of it, so that a project of before there were any reads the file, too.
    left_out = {"entries": {entry: {"candidate"}}} if served.candidate is None else None
    text = json.dumps(_State(entries={entry: served}).model_dump(exclude=left_out), indent=2) + "\n"
    path = repository / state_file(name)
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StateError(
            f"{path} cannot be written: {error}", remedy="free some space or correct the permissions"
        ) from None


def served_now(repository: Path, name: str = "") -> Served | None:
    """What a start serves: the state's versions as far as they are there, else the newest; None where there is none.

    Raises:
        StateError: the state file is broken, or the version it names is not published any more.
    """
    state, there = read_state(repository, name), published_versions(repository, name)
    if state is None:
        return Served(served=there[-1], lanes=(there[-1],)) if there else None
    if state.served not in there:
        raise StateError(
            f"the served version{of_model(name)} is not in {repository}", value=state.served,
            limit=f"published: {', '.join(map(str, there)) or 'none'}",
            remedy=f"put its folders back, or remove {repository / state_file(name)}: "
            f"then {_newest(repository, name)} is served",
        )  # fmt: skip
    lanes = tuple(version for version in state.lanes if version in there)
    previous = state.previous if state.previous in there else None
    candidate = state.candidate if state.candidate is not None and state.candidate.version in there else None
    return Served(served=state.served, previous=previous, lanes=lanes, candidate=candidate)


def _newest(repository: Path, name: str) -> int:
    return max(published_versions(repository, name), default=1)
