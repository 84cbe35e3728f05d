"""Each family's random model, exported once."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from tests.fuse.models import exported, random_encoder


@pytest.fixture(scope="session")
def graph_of() -> Callable[..., ir.Model]:
    """The exported graph of a family: do not change it, fuse a clone."""
    made: dict[tuple[str, str, int], ir.Model] = {}

    def get(family: str, attention: str = "eager", opset: int = 20) -> ir.Model:
        key = (family, attention, opset)
        if key not in made:
            made[key] = exported(random_encoder(family, attention=attention), opset)
        return made[key]

    return get
