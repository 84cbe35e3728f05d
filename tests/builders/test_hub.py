"""Models named by their place on the hub: fetched as safetensors alone, refused clearly where it cannot be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.errors import SourceError
from builders.hub import fetch
from builders.settings import load_settings


@pytest.mark.parametrize("name", ["hub:", "hub:just-a-name", "hub:a/b/c", "hub:a b/c", "hub:../x/y"])
def test_name_refused_when_it_is_none_of_the_hub(name: str) -> None:
    with pytest.raises(SourceError, match="limit: hub:ORG/NAME"):
        fetch(name)


def test_reason_and_way_out_told_when_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match="to do: download the folder where the hub can be reached"):
        fetch("hub:org/model-that-is-in-no-cache")


def test_no_pickle_and_no_code_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetch("hub:org/model@abc") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/model", "abc")
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".bin", ".py", "*"))]


def test_hub_name_not_taken_for_a_path_of_the_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("model: {source: 'hub:org/model'}", encoding="utf-8")
    assert load_settings(file).model.source == "hub:org/model"
