"""A fake Triton and a door in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.clients.fake_triton import TASKS, FakeTriton, serve
from tests.door.doors import RunningDoor, running

MODELS = ",".join(["encode", *TASKS])


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve() as fake:
        yield fake


@pytest.fixture
def door(triton: FakeTriton) -> Iterator[RunningDoor]:
    with running(triton.url, models=MODELS) as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[RunningDoor, FakeTriton]]:
    """A door for requests that must not reach the server, so that one is enough for all of them."""
    with serve() as fake, running(fake.url, models=MODELS) as made:
        yield made, fake


@pytest.fixture
def openai(door: RunningDoor) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none needed", max_retries=0) as client:
        yield client
