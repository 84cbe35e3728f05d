"""Drivers of this product: from a settings file with overrides, or from another checkout with its own code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from builders.bench.driver import BenchError, Child, grpc_ready, has_content, log_file
from builders.build import BuildOptions, BuildResult, build
from builders.errors import ServerError
from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import DeploySettings, read_document
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
        logs: folder of its log; a temporary file by default.

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
        logs: Path | None = None,
    ):
        """See the class."""
        self.name, self.about = variant.name, variant.about
        self.settings = overridden(settings, variant, work, share=share)
        self.gpus = len(self.settings.engine.gpus) if self.settings.engine.kind == "tensorrt" else 0
        self._options = BuildOptions(skip=variant.skip, gate=False)
        self._cache, self._say, self._change, self._share = cache, say, change, share
        self._log, self._kept_before = log_file(logs, self.name), False
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
        """See `Driver`; builds first, without the accuracy gate: what is measured here is time."""
        if self._built is None or self._share:
            self._built = self._build()
            if self._change:
                self._change(self._built)
        entry = self._built.entry_model
        self._kept_before = has_content(self._log)
        server = TritonServer(
            self._built.repository, self._built.models, ports=free_ports(), log_path=self._log, drain_models=[entry]
        )
        server.__enter__()
        self._server = server
        return Target(server.grpc_url, model=entry, question=question_for(self._built.source))

    def _build(self) -> BuildResult:
        built = build(self.settings, self._cache, self._say, self._options)
        if built.served != built.version:
            # The newest is served: other code has published here since this version was new. The folder is the bench's.
            shutil.rmtree(built.repository)
            built = build(self.settings, self._cache, self._say, self._options)
        return built

    def ended(self) -> str | None:
        """See `Driver`."""
        try:
            if self._server is not None:
                self._server.raise_if_ended()
        except ServerError as error:
            return str(error)
        return None

    def stop(self) -> None:
        """See `Driver`."""
        died = self.ended() is not None
        server, self._server = self._server, None
        if server is None:
            return
        try:
            server.stop()
            if self._log is not None and server.stopped_cleanly and not died and not self._kept_before:
                self._log.unlink(missing_ok=True)
        except BaseException:  # a second Ctrl-C: nothing is waited for any more, and nothing left
            server.kill()
            raise


class CheckoutDriver:
    """The server of another checkout, by its own `python -m builders serve`.

    It publishes into an empty repository below `work`, which goes when the server is stopped. In the checkout's own a
    promote or an earlier start may hold an older version; in one that was kept the newest version would be served,
    which is not the checkout's when its model or its packages are again what they were before.

    Args:
        name: for the table.
        checkout: root of the other working tree.
        config: its settings file, relative to the root.
        work: folder for the repository; one that a killed bench left there is removed at the start.
        target: a target of this project's, for the model's name and the form of requests; its address is replaced.
        model: which of several models of the file.
        logs: folder of its log; a temporary file by default.

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
        logs: Path | None = None,
    ):
        """See the class."""
        self.name, self.about, self.gpus = name, f"{checkout}, {config}", 0
        if not (checkout / "builders" / "cli.py").is_file() or not (checkout / config).is_file():
            raise BenchError("no such checkout or settings file", value=str(checkout / config), remedy="see --paired")
        ports = free_ports()
        self._url, self._metrics = f"127.0.0.1:{ports.grpc}", f"http://127.0.0.1:{ports.metrics}/metrics"
        self._config = (checkout / config).resolve()
        self._place = work.resolve() / f"checkout-{name}"
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
            log=log_file(logs, name),
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
        """See `Driver`; the checkout builds first, with its accuracy gate."""
        if self._place.exists():
            shutil.rmtree(self._place)
        self._place.mkdir(parents=True)
        settings = {"extends": str(self._config), "repository": str(self._place / "model_repository")}
        (self._place / "deploy.yaml").write_text(json.dumps(settings | _patient(self._config)), encoding="utf-8")
        self._child.start()
        return self._target

    def ended(self) -> str | None:
        """See `Driver`."""
        return self._child.ended()

    def stop(self) -> None:
        """See `Driver`; the repository goes, too."""
        try:
            self._child.stop()
        finally:
            shutil.rmtree(self._place, ignore_errors=True)


def _patient(config: Path) -> dict[str, Any]:
    """What a file that extends `config` says for queue timeouts that nothing runs into.

    Several models may have their own, which the file's do not overrule. Nothing else of the settings is looked at: they
    are another checkout's, with another checkout's names.
    """
    items = read_document(config).get("models")
    if not isinstance(items, list):
        return dict(PATIENT)
    return {**PATIENT, "models": [merge(item, PATIENT) if isinstance(item, Mapping) else item for item in items]}


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
