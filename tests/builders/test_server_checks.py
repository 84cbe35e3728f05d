"""What is refused before a server starts: models that are not there, and too little shared memory."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from builders import server_checks
from builders.errors import ServerError
from builders.server import TritonServer
from builders.server_checks import check_models, check_shared_memory, large_pages
from tests.builders.test_server import tiny_repository


def test_lists_the_models_there_are_when_one_is_unknown(tmp_path: Path) -> None:
    repository = tiny_repository(tmp_path)
    with pytest.raises(ServerError, match="'encode'; limit: one of probe"):
        TritonServer(repository, ["encode"])
    with pytest.raises(ServerError, match="no model to load"):
        check_models(repository, [])
    with pytest.raises(ServerError, match="no folder"):
        check_models(repository / "absent", ["probe"])


def test_is_refused_with_a_remedy_when_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_repository(tmp_path, count=9)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(server_checks.shutil, "disk_usage", lambda path: usage(64 << 20, 30 << 20, 34 << 20))
    with pytest.raises(ServerError, match=r"34 MiB.*36 MiB for 9 Python model instances.*--shm-size") as caught:
        check_shared_memory(tmp_path, ["probe"], 4 << 20)
    assert caught.value.remedy is not None
    check_shared_memory(tmp_path, ["probe"], 3 << 20)


def test_large_pages_for_cpu_engines_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_repository(tmp_path)
    monkeypatch.setattr(server_checks.os, "confstr", lambda _: "glibc 2.35")
    assert large_pages(tmp_path, ["probe"], {}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert large_pages(tmp_path, ["probe"], {"GLIBC_TUNABLES": ""}) == {}
    config = tmp_path / "probe" / "config.pbtxt"
    config.write_text(config.read_text("utf-8").replace('"python"', '"tensorrt"'), encoding="utf-8")
    assert large_pages(tmp_path, ["probe"], {}) == {}


@pytest.mark.parametrize("library", ["glibc 2.34", "musl 1.2", None])
def test_no_large_pages_when_the_c_library_does_not_know_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    tiny_repository(tmp_path)
    monkeypatch.setattr(server_checks.os, "confstr", lambda _: library)
    assert large_pages(tmp_path, ["probe"], {}) == {}
