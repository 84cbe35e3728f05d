"""A fake server, and each of the four ways to call it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.certificates import make_certificates
from tests.clients.fake_triton import FakeTriton, serve
from tests.clients.ways import WAYS, Way


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve() as fake:
        yield fake


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def client(server: FakeTriton, way: Way) -> Iterator[Any]:
    with way.client(server) as made:
        yield made


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
