"""Which models an entry or an ensemble calls, and in which version, by what Triton has loaded; standard library alone.

Several versions of a lane may be loaded: after a promote or a rollback the other one stays, and a version on trial
stands beside the served one. Asked without a version, Triton takes the highest, whoever uses it.
"""

from __future__ import annotations

import json
from typing import Any

from triton_http import Triton


def calls_of(model: str, triton: Triton) -> dict[str, int] | None:
    """The models that an entry or an ensemble calls, with their version; None where the server does not say.

    Args:
        model: its name.
        triton: where it is loaded.
    """
    # While it changes over two versions may be there; what is loaded last is what stays.
    metadata = triton.get(f"/v2/models/{model}").json()
    versions = metadata.get("versions") if isinstance(metadata, dict) else None
    if not versions:
        return None
    version = max(map(int, versions))
    config = triton.get(f"/v2/models/{model}/versions/{version}/config").json()
    if not isinstance(config, dict):
        return None
    steps = (config.get("ensemble_scheduling") or {}).get("step", [])
    called = {step["model_name"]: int(step["model_version"]) for step in steps if int(step["model_version"]) > 0}
    # An entry calls the lanes of its own version.
    return called or dict.fromkeys(_lanes(config), version)


def _lanes(config: dict[str, Any]) -> list[str]:
    """The bucket models that an entry's configuration names."""
    try:
        facts = json.loads(config["parameters"]["entry"]["string_value"])
        return [str(bucket["model"]) for bucket in facts["buckets"]]
    except (KeyError, TypeError, ValueError):
        return []
