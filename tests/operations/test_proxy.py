"""The TLS proxy when the server behind it comes later, and when it is made anew at another address."""

from __future__ import annotations

import http.client
import re
import ssl
from contextlib import AbstractContextManager
from pathlib import Path

from builders.ports import free_ports
from tests.operations.container import compose
from tests.operations.proxy import Proxy, name_server, running_proxy
from tests.tools.played import playing
from tests.tools.waiting import until


def server(address: str, port: int) -> AbstractContextManager[int]:
    """Says its address to every question."""
    return playing(lambda asked: (200, address), address=address, port=port)


def ask(proxy: Proxy) -> tuple[int, str]:
    trust = ssl.create_default_context(cafile=str(proxy.certificate))
    connection = http.client.HTTPSConnection("localhost", proxy.http, context=trust, timeout=10)
    try:
        connection.request("GET", "/v2/health/ready")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_server_that_comes_later_and_one_made_anew_at_another_address_are_found(tmp_path: Path) -> None:
    ports = free_ports()
    with name_server(None) as names, running_proxy(tmp_path, ports, names.at) as proxy:
        assert ask(proxy)[0] == 502
        with server("127.0.0.2", ports.http):
            names.address = "127.0.0.2"
            assert until(lambda: ask(proxy) == (200, "127.0.0.2"), 10.0)
        # Its address is gone with it.
        with server("127.0.0.3", ports.http):
            names.address = "127.0.0.3"
            assert until(lambda: ask(proxy) == (200, "127.0.0.3"), 10.0), proxy.log.read_text(encoding="utf-8")


def test_the_image_has_an_nginx_that_looks_names_up_again() -> None:
    image = compose()["services"]["proxy"]["image"]
    found = re.search(r":(\d+)\.(\d+)(?:\.(\d+))?-", image)
    assert found
    assert tuple(int(part or 0) for part in found.groups()) >= (1, 27, 3)
