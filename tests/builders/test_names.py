"""Names in a repository of several models: no folder and no file can belong to two of them."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import pytest

from builders.names import NAME, entry_model, is_entry, is_lane, lane_model, make_command, other_models, own_file

NAMES = ("", "a", "a_1", "a_1_16", "r_16", "encoder", "encoder_16", "r", "a_", "staging")
LENGTHS = (1, 16, 116)


def test_no_two_models_have_a_folder_or_a_file_in_common() -> None:
    assert all(re.fullmatch(NAME, name) for name in NAMES if name)
    folders = [entry_model(name) for name in NAMES] + [lane_model(name, length) for name in NAMES for length in LENGTHS]
    assert len(set(folders)) == len(folders)
    files = [
        own_file(name, what, suffix) for name in NAMES for what, suffix in (("served", ".json"), ("builders", ".lock"))
    ]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize(("one", "other"), list(permutations(NAMES, 2)))
def test_lane_of_one_model_is_no_lane_of_another(one: str, other: str) -> None:
    for length in LENGTHS:
        assert is_lane(lane_model(one, length), one)
        assert not is_lane(lane_model(one, length), other)
        assert not is_entry(lane_model(one, length))


def test_folder_of_somebody_else_is_neither_lane_nor_entry() -> None:
    for folder in (
        "encoder_of_another_team",
        "encoder_",
        "encoder_a_16b",
        "encoder_٣",
        "encoders",
        "encode_16",
        "Encode",
    ):
        assert not any(is_lane(folder, name) for name in NAMES)
        assert not is_entry(folder)


def test_other_entries_of_a_repository_found_and_strange_folders_not(tmp_path: Path) -> None:
    for model in ("encode", "encode_a", "encode_b", "encoder_a_16", "encode_9", "reranker"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.pbtxt").touch()
    (tmp_path / "encode_c").mkdir()
    assert list(other_models(tmp_path, ["a"])) == ["encode", "encode_b"]
    assert list(other_models(tmp_path, ["", "a", "b"])) == []


def test_command_names_the_model_where_it_has_a_name() -> None:
    assert make_command("promote VERSION=2", "a") == "make promote VERSION=2 MODEL=a"
    assert make_command("promote VERSION=2", "") == "make promote VERSION=2"
