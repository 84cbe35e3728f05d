"""JSON files of a model's folder: read whole, refused with their name and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders.errors import SourceError


def read_json(path: Path, remedy: str) -> Any:
    """The document of a file.

    Raises:
        SourceError: it is missing or no JSON; `remedy` says what to do about it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"the model has no {path.name}", value=str(path), remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path.name} cannot be read ({error})", value=str(path), remedy=remedy) from None


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        SourceError: see `read_json`, or the document is no object.
    """
    document = read_json(path, remedy)
    if not isinstance(document, dict):
        raise SourceError(f"{path.name} is no JSON object", value=str(path), remedy=remedy)
    return document


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The JSON object of a file that may be missing; empty then.

    Raises:
        SourceError: it is there but cannot be read.
    """
    return read_object(path, "remove or correct the file") if path.is_file() else {}
