"""The folder behind `model.source`: a path, a folder inside an installed package, or a download of a model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from builders.errors import SourceError
from builders.hub import HUB, fetch

_PACKAGE = "package:"


def find_model(source: str) -> Path:
    """The folder behind `model.source`, absolute. A package is located, its code does not run.

    Raises:
        SourceError: no such folder, package or download; the message lists what is there.
    """
    if source.startswith(_PACKAGE):
        return _resolve_package(source)
    if source.startswith(HUB):
        return fetch(source)
    folder = Path(source).expanduser().resolve()
    if not folder.is_dir():
        raise SourceError("model.source is no folder", value=source, limit=_there(folder), remedy="correct the path")
    return folder


def _resolve_package(source: str) -> Path:
    name, _, inner = source.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier():
        raise SourceError(
            "model.source names no package", value=source, limit="package:NAME/PATH", remedy="write the import name"
        )
    # find_spec of a top-level name only locates it: the package's own code does not run.
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    if spec is None:
        raise SourceError(
            "the package of model.source is not installed", value=name, remedy=f"pip install {name.replace('_', '-')}"
        )
    roots = [Path(root).resolve() for root in spec.submodule_search_locations or ()]
    if not roots:
        raise SourceError("model.source names a single module", value=name, limit="a package: it holds a folder")
    folders = [(root / inner).resolve() for root in roots]
    for root, folder in zip(roots, folders, strict=True):
        if folder.is_dir() and folder.is_relative_to(root):
            return folder
    raise SourceError(
        "no such folder in the package of model.source",
        value=source,
        limit=_there(folders[0]),
        remedy="write one of the folders that are there",
    )


def _there(missing: Path) -> str:
    """The folders at the deepest level of `missing` that exists."""
    parent = next(path for path in missing.parents if path.is_dir())
    found = sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    more = ", ..." if len(found) > 12 else ""
    return f"folders in {parent}: {', '.join(found[:12]) or 'none'}{more}"
