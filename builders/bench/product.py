"""Drivers of this product: from a settings file with overrides, or from another checkout with its own code."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from builders.bench.driver import BenchError, Child, grpc_ready
from builders.build import BuildOptions, BuildResult, build
from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import DeploySettings
from builders.source import EncoderSource
from clients.load.target import Target

#: The first text of each pair, for a model that takes pairs alone; the texts of the load are the second.
QUESTION = "What is this about?"
#: Every request of a bench is to be answered, however slow the row: what a queue refuses is measured elsewhere.
PATIENT: Mapping[str, Any] = {
    "entry": {
        "interactive": {"timeout_ms": 600_000, "queue_size": 100_000},
        "background": {"timeout_ms": 600_000, "queue_size": 100_000},
    }
}


@dataclass(frozen=True)
class Variant:
    """A settings file with something changed.

    Attributes:
        name: for the table.
        about: what is changed.
        overrides: nested mapping over the settings, as in deploy.yaml.
        skip: fusion steps to leave out of the graph.
    """

    name: str
    about: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()


class ProductDriver:
    """This checkout's server on a repository of its own.

    Args:
        settings: of the deployment.
        variant: what to change in them.
        work: folder for the repositories.
        cache: of exported graphs.
        say: told what the build does.
        change: called with the finished build before the server starts; tests put another engine in its place.
        share: one repository for all variants whose engines are the same, so that they are compiled once; each start
            renders its own configurations into it. Only for servers that never run beside each other.

    Raises:
        BenchError: the changed settings cannot work; it names the variant.
    """

    def __init__(
        self,
        settings: DeploySettings,
        variant: Variant,
        work: Path,
        cache: Path,
        say: Callable[[str], None],
        change: Callable[[BuildResult], None] | None = None,
        share: bool = False,
    ):
        """See the class."""
        self.name, self.about = variant.name, variant.about
        self.settings = overridden(settings, variant, work, share=share)
        self.gpus = len(self.settings.engine.gpus) if self.settings.engine.kind == "tensorrt" else 0
        self._options = BuildOptions(skip=variant.skip, gate=False)
        self._cache, self._say, self._change, self._share = cache, say, change, share
        self._server: TritonServer | None = None
        self._built: BuildResult | None = None

    @property
    def metrics_url(self) -> str | None:
        """See `Driver`."""
        return self._server.metrics_url if self._server else None

    @property
    def pid(self) -> int | None:
        """See `Driver`."""
        return self._server.pid if self._server else None

    def start(self) -> Target:
        """See `Driver`; builds first, without the accuracy gate: what is measured here is time.

        Raises:
            BenchError: the shared repository serves another version than this one.
        """
        if self._built is None or self._share:
            self._built = build(self.settings, self._cache, self._say, self._options)
            if self._change:
                self._change(self._built)
        if self._built.served != self._built.version:
            raise BenchError(
                "the repository of the bench serves another version", value=self._built.served,
                limit=str(self._built.version), remedy=f"remove {self._built.repository.parent}",
            )  # fmt: skip
        entry = self._built.entry_model
        server = TritonServer(self._built.repository, self._built.models, ports=free_ports(), drain_models=[entry])
        server.__enter__()
        self._server = server
        return Target(server.grpc_url, model=entry, question=question_for(self._built.source))

    def stop(self) -> None:
        """See `Driver`."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            server.stop()
        except BaseException:  # a second Ctrl-C: nothing is waited for any more, and nothing left
            server.kill()
            raise


class CheckoutDriver:
    """The server of another checkout, by its own `python -m builders serve`.

    It publishes into a repository below `work`, one for each state of the checkout's code and settings: the checkout's
    own may be held at an older version by a promote or by an earlier start, and a bench has nothing to publish there.

    Args:
        name: for the table.
        checkout: root of the other working tree.
        config: its settings file, relative to the root.
        work: folder for the repository.
        target: a target of this project's, for the model's name and the form of requests; its address is replaced.
        model: which of several models of the file.

    Raises:
        BenchError: there is no such checkout or settings file.
    """

    def __init__(
        self,
        name: str,
        checkout: Path,
        config: Path,
        work: Path,
        target: Target | None = None,
        model: str = "",
    ):
        """See the class."""
        self.name, self.about, self.gpus = name, f"{checkout}, {config}", 0
        if not (checkout / "builders" / "cli.py").is_file() or not (checkout / config).is_file():
            raise BenchError("no such checkout or settings file", value=str(checkout / config), remedy="see --paired")
        ports = free_ports()
        self._url, self._metrics = f"127.0.0.1:{ports.grpc}", f"http://127.0.0.1:{ports.metrics}/metrics"
        self._config = (checkout / config).resolve()
        self._place = work / f"checkout-{name}-{_state_of(checkout, config)}"
        command = [sys.executable, "-m", "builders", "serve", "--config", str(self._place / "deploy.yaml")]
        command += ["--cache", str(self._config.parent / "build" / "cache")]
        command += ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
        command += ["--metrics-port", str(ports.metrics), *(["--model", model] if model else [])]
        # The root first: an editable install of this checkout must not be what it imports.
        path = os.pathsep.join(filter(None, [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]))
        self._target = replace(target, url=self._url) if target else Target(self._url)
        self._child = Child(
            command,
            lambda: grpc_ready(self._url, self._target.model),
            environment={"PYTHONPATH": path},
            folder=checkout,
            start_s=1800,
        )

    @property
    def metrics_url(self) -> str | None:
        """See `Driver`."""
        return self._metrics if self._child.pid else None

    @property
    def pid(self) -> int | None:
        """See `Driver`."""
        return self._child.pid

    def start(self) -> Target:
        """See `Driver`."""
        repository = self._place.resolve() / "model_repository"
        repository.mkdir(parents=True, exist_ok=True)
        # Without a state the newest version is served. Queue timeouts as in every bench; JSON is YAML, too.
        for state in repository.glob(".served*.json"):
            state.unlink()
        settings = {"extends": str(self._config), "repository": str(repository), **PATIENT}
        (self._place / "deploy.yaml").write_text(json.dumps(settings), encoding="utf-8")
        self._child.start()
        return self._target

    def stop(self) -> None:
        """See `Driver`."""
        self._child.stop()


def _state_of(checkout: Path, config: Path) -> str:
    """Hash of a checkout's place, code and settings files."""
    total = hashlib.sha256(f"{checkout.resolve()}\n{config}".encode())
    code = (path for folder in ("builders", "clients") for path in (checkout / folder).rglob("*.py"))
    for path in sorted((*code, *checkout.glob("*.yaml"), checkout / config)):
        total.update(f"\n{path}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def question_for(source: EncoderSource) -> str:
    """The first text of each request's pair; empty where the model reads single texts."""
    return QUESTION if source.task.pair == "required" else ""


def overridden(settings: DeploySettings, variant: Variant, work: Path, *, share: bool = False) -> DeploySettings:
    """The settings with a variant's overrides, publishing into a folder of their own below `work`.

    Raises:
        BenchError: the combination cannot work.
    """
    merged = merge(settings.model_dump(), variant.overrides)
    merged.pop("repository", None)
    deciding = _deciding(merged) if share else merged
    key = hashlib.sha256(json.dumps([deciding, variant.skip], sort_keys=True, default=str).encode()).hexdigest()[:12]
    try:
        return DeploySettings.model_validate(merged | {"repository": work / key / "model_repository"})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise BenchError(f"the settings of {variant.name!r} cannot work: {place} {problem['msg']}") from None


def _deciding(merged: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a version: the rest is configuration, which every start renders anew."""
    lanes = {
        name: {key: value for key, value in lane.items() if key in ("up_to", "above", "batch")}
        for name, lane in merged["lanes"].items()
    }
    return {**{key: merged[key] for key in ("name", "model", "buckets", "engine")}, "lanes": lanes}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key; anything else replaces what was there. Neither is changed."""
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        result[key] = merge(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result
