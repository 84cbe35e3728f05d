"""The key and TLS before a server starts: what is refused, what is written down."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from builders.access import KEY_FILE, RESTRICTED, Access, ClientTls, made_up_key, read_key
from builders.errors import ServerError
from builders.serve_options import access_of, key_for


def test_all_doors_are_named_for_both_protocols_when_there_is_a_key() -> None:
    arguments = Access(("name", "value")).arguments()
    closed = "model-repository,shared-memory,trace,logging:name=value"
    assert arguments == [f"--grpc-restricted-protocol={closed}", f"--http-restricted-api={closed}"]
    assert len(RESTRICTED) == 4
    assert Access().arguments() == []


def test_made_up_key_is_this_users_alone_and_gone_with_its_server(tmp_path: Path) -> None:
    with made_up_key(tmp_path) as key:
        assert read_key(tmp_path) == key
        assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
        assert len(key[1]) >= 32
    assert read_key(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_key_of_a_later_server_stays_when_an_earlier_one_ends(tmp_path: Path) -> None:
    with made_up_key(tmp_path) as first:
        later = made_up_key(tmp_path)
        second = later.__enter__()
        assert first != second
    assert read_key(tmp_path) == second
    later.__exit__(None, None, None)
    assert read_key(tmp_path) is None


def test_refused_with_a_remedy_when_the_key_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="--control-key NAME=VALUE"), made_up_key(tmp_path / "missing"):
        pass


@pytest.mark.parametrize("content", ["", "no equals sign", "=value", "name="])
def test_no_key_when_the_file_holds_none(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY_FILE).write_text(content)
    assert read_key(tmp_path) is None


def test_refused_when_a_part_of_tls_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    file.touch()
    with pytest.raises(ServerError, match="both --tls-cert and --tls-key"):
        Access(certificate=file)
    with pytest.raises(ServerError, match="over TLS alone"):
        Access(client_ca=file)
    with pytest.raises(ServerError, match=r"cannot be read: .*b\.pem"):
        Access(certificate=file, private_key=tmp_path / "b.pem")
    with pytest.raises(ServerError, match="--tls-client-key"):
        ClientTls(file, certificate=file)


def test_commands_find_the_key_that_serve_made_up_unless_one_is_given(tmp_path: Path) -> None:
    with access_of(tmp_path, None, None, None, None) as access:
        assert access.key is not None
        assert key_for(tmp_path, None) == access.key
        assert key_for(tmp_path, "mine=1") == ("mine", "1")
    assert key_for(tmp_path, None) is None


def test_no_file_written_when_the_key_is_given(tmp_path: Path) -> None:
    with access_of(tmp_path, "mine=1", None, None, None) as access:
        assert access.key == ("mine", "1")
        assert access.http_headers == {"mine": "1"}
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("user", "warned"), [(0, True), (1000, False)])
def test_warned_when_serve_runs_as_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, warned: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr("builders.serve_options.say", told.append)
    monkeypatch.setattr("os.geteuid", lambda: user)
    with access_of(tmp_path, "mine=1", None, None, None):
        pass
    assert bool(told) == warned
