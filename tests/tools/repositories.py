"""Model repositories for tests, built by the project's own builder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import yaml

from builders.build import BuildOptions, BuildResult, build, graph_cache
from builders.engine import reference_graph
from builders.settings import DeploySettings, load_deployments, load_settings
from builders.source import open_source

ROOT = Path(__file__).resolve().parents[2]
#: Exported graphs are kept here between runs, as `make demo` keeps them.
CACHE = ROOT / "build" / "cache"


def settings_file(folder: Path, base: str, **overrides: Any) -> Path:
    """A settings file in `folder` that extends one of the checked-in ones and publishes below `folder`."""
    path = folder / "deploy.test.yaml"
    document = {"extends": str(ROOT / base), "repository": str(folder / "model_repository"), **overrides}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def build_ungated(settings: DeploySettings) -> BuildResult:
    """What `build` gives without the accuracy gate, which has tests of its own.

    Of processes that need the same graph at the same time one exports it, and the others wait for that.
    """
    source = open_source(settings.model)
    exported = graph_cache(CACHE) / f"{source.sha256[:12]}-fp32"
    exported.parent.mkdir(parents=True, exist_ok=True)
    with exported.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (exported / "export.json").exists():
            reference_graph(source, None, exported.parent, print)
    return build(settings, CACHE, print, BuildOptions(gate=False))


def repository(folder: Path, base: str = "deploy.cpu.yaml", **overrides: Any) -> BuildResult:
    """Build a repository below `folder`, without the accuracy gate."""
    return build_ungated(load_settings(settings_file(folder, base, **overrides)))


def repositories(folder: Path, models: list[dict[str, Any]], **overrides: Any) -> list[BuildResult]:
    """Build several models into one repository below `folder`, as `repository` does with one."""
    file = settings_file(folder, "deploy.cpu.yaml", models=models, **overrides)
    return [build_ungated(settings) for settings in load_deployments(file)]


def timed_repository(
    folder: Path,
    service_s: float,
    base: str = "deploy.cpu.yaml",
    *,
    long_s: float | None = None,
    per_text_s: float = 0.0,
    **overrides: Any,
) -> BuildResult:
    """A repository whose bucket models take a known time and no CPU.

    Args:
        folder: where to build it.
        service_s: seconds a batch.
        base: settings file that the overrides are for.
        long_s: seconds a batch of buckets above 512 tokens; as the others when left out.
        per_text_s: seconds more for each text of a batch.
        overrides: settings.
    """
    built = repository(folder, base, **overrides)
    code = Path(__file__).with_name("timed_lane.py").read_text(encoding="utf-8")
    for model in built.models:
        if model.startswith("encoder_"):
            is_long = int(model.removesuffix("_queued").rsplit("_", 1)[1]) > 512
            own = long_s if is_long and long_s is not None else service_s
            timed = code.replace("SERVICE_S = 0.0", f"SERVICE_S = {own}")
            timed = timed.replace("PER_TEXT_S = 0.0", f"PER_TEXT_S = {per_text_s}")
            version = built.repository / model / str(built.version)
            # The queued lane of an ensemble is the lane's own model, with its wake-up around it.
            file = version / "lanes_lane/model.py" if model.endswith("_queued") else version / "model.py"
            file.write_text(timed, encoding="utf-8")
    return built
