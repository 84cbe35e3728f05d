"""A profile of a real server on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from builders.profile.run import lines_of, run_profile
from builders.settings import load_settings
from tests.integration.conftest import PATIENT
from tests.tools.repositories import repository, settings_file


def test_profile_of_a_served_model_says_where_the_time_goes(tmp_path: Path) -> None:
    overrides = {"buckets": [32, 64], "model": {"max_tokens": 64}, "entry": {**PATIENT, "processes": 1}}
    built = repository(tmp_path, **overrides)
    settings = load_settings(settings_file(tmp_path, "deploy.cpu.yaml", **overrides))
    published = {path: path.read_bytes() for path in built.repository.glob("*/config.pbtxt")}
    profile = run_profile(built, settings, tmp_path / "profile", print, seconds=2.0, clients=4)
    assert not profile.latencies.errors
    assert {"decode", "tokenise", "group", "lanes", "respond"} <= set(profile.path["entry"])
    assert profile.path["lanes"].keys() <= {"encoder_32", "encoder_64"}
    assert 0 < profile.path["engine_busy"] <= 1
    assert profile.statistics["encode"].requests == len(profile.latencies.all)
    text = "\n".join(lines_of(profile))
    assert "bottleneck: " in text
    assert "tokenise" in text
    written = json.loads((tmp_path / "profile/profile.json").read_text())
    assert written["verdict"]["kinds"] == list(profile.verdict.kinds)
    assert (tmp_path / "profile/timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert {path: path.read_bytes() for path in published} == published, "what is published is as it was"
    assert not list(built.repository.parent.glob(".profile-*"))
