"""A model named by its place on the Hugging Face hub, where the hub can be reached."""

from __future__ import annotations

import re
from pathlib import Path

from builders.errors import SourceError

HUB = "hub:"
#: What an encoder needs: weights as safetensors alone (a pickle can run code), no Python files.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
_REMEDY = "download the folder where the hub can be reached and name it in model.source"


def fetch(source: str) -> Path:
    """The folder of `hub:ORG/NAME` or `hub:ORG/NAME@REVISION` in the local cache, downloaded when it is not there.

    Raises:
        SourceError: no such name, or the hub cannot be reached and the model is not in the cache.
    """
    name, _, revision = source.removeprefix(HUB).partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise SourceError(
            "model.source names no model of the hub", value=source, limit="hub:ORG/NAME", remedy="write both names"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SourceError(
            "huggingface_hub is not installed", value=source, remedy="pip install huggingface_hub"
        ) from None
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES), etag_timeout=10)
    except Exception as error:  # the library raises its own, httpx's and OSError kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"the hub gave no model ({reason})", value=source, remedy=_REMEDY) from None
    return Path(folder)
