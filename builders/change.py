"""One change of the served version, step by step, and the way back when a step fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.contract import TEXT, TEXT_PAIR, Contract
from builders.control import ModelControl
from builders.errors import AnswerError, ControlError
from builders.manifest import Manifest
from builders.names import is_ensemble
from builders.render import facts_of_manifest, render_versions, stale_configs, write_config
from builders.settings import DeploySettings

_PROBE = "Is this version ready to answer?"
#: What the entry answers in words instead of the lanes' numbers, by task.
SPOKEN: Mapping[str, str] = MappingProxyType({"tagging": "ENTITIES", "answering": "ANSWERS"})


@dataclass
class VersionChange:
    """The configurations that a change writes and the models that it loads, and how they are put back.

    Attributes:
        repository: the model repository.
        settings: the deployment.
        control: the running server; None where configurations alone change.
        progress: told one line per step.
        manifests: the versions whose lanes are to be loaded.
    """

    repository: Path
    settings: DeploySettings
    control: ModelControl | None
    progress: Callable[[str], None]
    manifests: dict[int, Manifest]
    before: dict[str, str | None] = field(default_factory=dict)
    """Texts of the configurations as they were; None where there was none."""
    touched: list[str] = field(default_factory=list)
    """Models whose configuration was written, in that order."""

    def configs(self, served: int) -> dict[str, str]:
        """Every configuration with the lanes of all versions of this change and the entry of one."""
        facts = {v: facts_of_manifest(self.settings, manifest) for v, manifest in self.manifests.items()}
        return render_versions(self.settings, facts, served)

    def lanes(self, version: int) -> Iterator[tuple[str, int]]:
        """Lane models of a version and their lengths."""
        manifest = self.manifests[version]
        for bucket in manifest.buckets:
            yield manifest.lane_model(bucket.length), bucket.length

    def steps(self, version: int) -> Iterator[str]:
        """Models that a version's entry or one of its ensembles calls: lanes, and the ensembles' own steps."""
        yield from (model for model, _ in self.lanes(version))
        for tokenize, queued, _ in self.manifests[version].steps_of_ensembles:
            yield from (tokenize, queued)

    def versions_of(self, model: str) -> tuple[int, ...]:
        """Versions of this change that have this lane or step."""
        return tuple(sorted(v for v in self.manifests if model in self.steps(v)))

    def lanes_ready(self, version: int) -> bool:
        """Whether everything that a version calls is loaded."""
        index = self.control.index() if self.control else {}
        return all(version in index.get(model, ()) for model in self.steps(version))

    def load_lanes(self) -> bool:
        """Lanes of all versions of this change, loaded, warmed and asked once; whether anything was loaded."""
        entry, configs = self.settings.entry_model, self.configs(max(self.manifests))
        configs = {model: text for model, text in configs.items() if model != entry and not is_ensemble(model)}
        index = self.control.index() if self.control else {}
        loaded = False
        for number, (model, text) in enumerate(configs.items(), start=1):
            wanted = self.versions_of(model)
            if not self._write(model, text) and index.get(model) == wanted:
                continue
            if self.control:
                self.progress(f"loading {model}, versions {_listed(wanted)} ({number} of {len(configs)})")
                self._load(model, wanted)
                loaded = True
        if self.control:
            for version, manifest in self.manifests.items():
                contract = _contract(manifest)
                queued = [(model, length) for _, model, length in manifest.steps_of_ensembles]
                for model, length in (*self.lanes(version), *queued):
                    answer = self.control.ask_lane(model, version, contract.widths(length), contract.output)
                    _check_numbers(answer, [1, *contract.dims(length)], model, version)
        return loaded

    def switch(self, version: int) -> float:
        """Change the entry, then its ensembles, over to `version` and ask them; returns the seconds."""
        began, configs = time.monotonic(), self.configs(version)
        for model in (self.settings.entry_model, *self.manifests[version].ensemble_models):
            self._write(model, configs[model])
            if self.control:
                self.progress(f"loading {model}, version {version}")
                self._load(model, (version,))
                self._ask_entry(model, version)
        return time.monotonic() - began

    def _ask_entry(self, entry: str, version: int) -> None:
        """One question to the entry, whose answer must have the form of its task."""
        if self.control is None:
            return
        manifest = self.manifests[version]
        texts = {TEXT: _PROBE} if manifest.requests.pair != "required" else {TEXT: _PROBE, TEXT_PAIR: _PROBE}
        spoken = SPOKEN.get(manifest.task)
        answer = self.control.ask_entry(entry, version, texts, spoken or manifest.output.name)
        if spoken is None:
            _check_numbers(answer, [1, manifest.output.size], entry, version)
        else:
            _check_json(answer, entry, version)

    def keep_only(self, version: int) -> None:
        """Give the memory of the other versions' lanes back; the entry does not call them any more."""
        self.manifests = {version: self.manifests[version]}
        for model, text in self.configs(version).items():
            if model != self.settings.entry_model and self._write(model, text) and self.control:
                self.control.load(model)

    def drop_ensembles(self, served: int) -> None:
        """Unload the ensembles that `served` has not, which would answer with another version than the entry."""
        kept = self.manifests[served].ensemble_models
        for path in stale_configs(self.repository, set(kept), self.settings.name):
            if is_ensemble(path.parent.name):
                self.progress(f"unloading {path.parent.name}: version {served} has no such ensemble")
                self._drop(path)

    def drop_unused(self) -> None:
        """Unload the lanes and steps that no version of this change has, and remove their configurations."""
        kept = {model for version in self.manifests for model in self.steps(version)}
        kept.update(model for manifest in self.manifests.values() for model in manifest.ensemble_models)
        for path in stale_configs(self.repository, kept, self.settings.name):
            self.progress(f"unloading {path.parent.name}")
            self._drop(path)

    def _drop(self, path: Path) -> None:
        if self.control:
            self.control.unload(path.parent.name)
        path.unlink()

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """On any failure, Ctrl-C too, the configurations and what the server serves are as before."""
        try:
            yield
        except BaseException as error:
            self.progress("it failed: what was served is put back")
            for problem in self.put_back():
                error.add_note(problem)
                self.progress(problem)
            raise

    def put_back(self) -> Iterator[str]:
        """Everything as it was before this change, the entry first, while all lanes are loaded.

        Yields:
            What could not be done.
        """
        for model in reversed(self.touched):
            text, path = self.before[model], self.repository / model / "config.pbtxt"
            try:
                if text is not None:
                    write_config(path, text)
                    # A load does nothing while Triton sees the file's old time.
                    os.utime(path)
                    if self.control:
                        self.control.load(model)
                    continue
                path.unlink(missing_ok=True)
                if self.control:
                    self.control.unload(model)
            except (ControlError, OSError) as problem:
                yield f"{model} could not be put back: {problem}"

    def _write(self, model: str, text: str) -> bool:
        """Whether the configuration had to be written."""
        path = self.repository / model / "config.pbtxt"
        current = path.read_text(encoding="utf-8") if path.exists() else None
        if current == text:
            return False
        if model not in self.before:
            self.before[model] = current
            self.touched.append(model)
        write_config(path, text)
        return True

    def _load(self, model: str, versions: tuple[int, ...]) -> None:
        if self.control is None:
            return
        if model not in self.before:
            path = self.repository / model / "config.pbtxt"
            self.before[model] = path.read_text(encoding="utf-8")
            self.touched.append(model)
        self.control.load(model)
        self.control.wait_served(model, versions)


def _contract(manifest: Manifest) -> Contract:
    """The lanes' tensors of a version."""
    output = manifest.output
    return Contract(output.name, output.size, output.per_token, manifest.requests.segment)


def _check_numbers(answer: NDArray[Any], shape: list[int], model: str, version: int) -> None:
    if list(answer.shape) != shape or not np.isfinite(answer).all():
        raise AnswerError(
            f"{model} version {version} answers wrongly",
            value=f"shape {list(answer.shape)}, {'finite' if np.isfinite(answer).all() else 'not finite'}",
            limit=f"finite, {shape}", remedy="make build-engines",
        )  # fmt: skip


def _check_json(answer: NDArray[Any], model: str, version: int) -> None:
    text = bytes(answer.ravel()[0]).decode(errors="replace") if answer.size else ""
    try:
        json.loads(text)
    except ValueError:
        raise AnswerError(
            f"{model} version {version} answers wrongly", value=text[:80], limit="JSON", remedy="make build-engines"
        ) from None


def _listed(versions: tuple[int, ...]) -> str:
    return " and ".join(map(str, versions))
