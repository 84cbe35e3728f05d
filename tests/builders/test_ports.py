"""Ports: from the environment, free ones for tests, and a clear refusal of taken ones."""

from __future__ import annotations

import socket
from dataclasses import astuple

import pytest

from builders.errors import ServerError
from builders.ports import Ports, free_ports


def test_gives_tritons_defaults_when_the_environment_names_none() -> None:
    assert Ports.from_environment({"HTTP_PORT": ""}) == Ports(http=8000, grpc=8001, metrics=8002)


def test_takes_each_port_when_the_environment_names_it() -> None:
    environment = {"HTTP_PORT": "9000", "GRPC_PORT": " 9001 ", "METRICS_PORT": "9002"}
    assert Ports.from_environment(environment) == Ports(9000, 9001, 9002)


@pytest.mark.parametrize("value", ["http", "80.5", "0", "65536", "-1", "٣"])
def test_names_the_variable_when_its_value_is_no_port(value: str) -> None:
    with pytest.raises(ServerError, match="GRPC_PORT") as caught:
        Ports.from_environment({"GRPC_PORT": value})
    assert "65535" in str(caught.value)


def test_refuses_when_two_ports_are_the_same() -> None:
    with pytest.raises(ServerError, match="http and metrics ports are the same: 8002"):
        Ports.from_environment({"HTTP_PORT": "8002"})


def test_free_ports_differ_and_are_free_when_chosen() -> None:
    ports = free_ports()
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    ports.check_free("127.0.0.1")


def test_free_ports_are_none_that_linux_gives_to_connections() -> None:
    assert max(port for _ in range(20) for port in astuple(free_ports())) < 32768


def test_taken_ports_are_passed_over_and_said_when_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports().http
    monkeypatch.setattr("builders.ports._UNASSIGNED", range(first, first + 1))
    with pytest.raises(ServerError, match=r"no free port was found \(Address already in use\).*50 tries"):
        free_ports()


def test_refuses_with_the_variable_to_change_when_a_port_is_taken() -> None:
    ports = free_ports()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", ports.grpc))
        holder.listen()
        with pytest.raises(ServerError) as caught:
            ports.check_free("127.0.0.1")
    assert str(ports.grpc) in str(caught.value)
    assert "--grpc-port or GRPC_PORT" in str(caught.value)


def test_stays_free_when_a_connection_to_it_was_only_just_closed() -> None:
    ports = free_ports()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", ports.http))
        listener.listen()
        with socket.create_connection(("127.0.0.1", ports.http)):
            accepted, _ = listener.accept()
            accepted.close()
    ports.check_free("127.0.0.1")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_names_the_host_when_it_is_no_address_of_this_machine(host: str) -> None:
    with pytest.raises(ServerError, match="--host"):
        free_ports().check_free(host)
