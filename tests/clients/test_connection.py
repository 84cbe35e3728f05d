"""Addresses, keys, traces, kept connections and TLS."""

from __future__ import annotations

import gc
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients import AsyncEncoderClient, EncoderClient, EncoderError, InvalidInput, ServerFailure, ServerUnavailable, Tls
from clients.connection import parse_address
from tests.clients.fake_triton import DIM, FakeTriton, serve
from tests.clients.ways import WAYS, Way
from tests.tools.waiting import until


@pytest.mark.parametrize(
    ("url", "transport", "protocol", "target", "encrypted"),
    [
        ("h:8001", None, "grpc", "h:8001", False),
        ("grpc://h:8001", None, "grpc", "h:8001", False),
        ("grpcs://h:8001/", None, "grpc", "h:8001", True),
        ("dns:///h:8001", None, "grpc", "dns:///h:8001", False),
        ("unix:/tmp/socket", None, "grpc", "unix:/tmp/socket", False),
        ("[::1]:8001", None, "grpc", "[::1]:8001", False),
        ("h:8000", "http", "http", "http://h:8000", False),
        ("http://h:8000/", None, "http", "http://h:8000", False),
        ("https://h/triton", "http", "http", "https://h/triton", True),
    ],
)
def test_url_says_protocol_target_and_encryption(
    url: str, transport: Any, protocol: str, target: str, encrypted: bool
) -> None:
    address = parse_address(url, transport, None)
    assert (address.protocol, address.target, address.tls is not None, address.url) == (
        protocol, target, encrypted, url,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("", {}),
        (" h:1", {}),
        ("ftp://h", {}),
        ("grpc://", {}),
        ("http://", {}),
        ("http://h:x", {}),
        ("http://h:8000?a=1", {}),
        ("http://h:8000", {"transport": "grpc"}),
        ("grpc://h:8000", {"transport": "http"}),
        ("h:8000", {"transport": "quic"}),
        ("http://h:8000", {"tls": Tls()}),
        (None, {}),
    ],
)
def test_url_that_is_no_address_is_refused(url: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"host:port|'grpc' or 'http'"):
        EncoderClient(url, **options)


@pytest.mark.parametrize(
    "headers", [{"a b": "x"}, {"a\n": "x"}, {"": "x"}, {"a-bin": "x"}, {"a": "x\ny"}, {"a": "é"}, {"a": 1}, {1: "a"}]
)
def test_header_that_cannot_be_sent_is_refused_without_showing_its_value(headers: dict[Any, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        EncoderClient(headers=headers)
    assert "é" not in str(caught.value)


def test_keys_and_headers_are_sent_with_every_request(server: FakeTriton, way: Way) -> None:
    options = {"token": "secret", "headers": {"X-Team": "search"}, "restricted_key": ("admin-key", "1234")}
    with way.client(server, **options) as client:
        client.encode("a", headers={"X-Call": "7"})
    headers = server.seen[0].headers
    assert (headers["authorization"], headers["x-team"], headers["x-call"]) == ("Bearer secret", "search", "7")
    assert headers["triton-grpc-protocol-admin-key" if way.protocol == "grpc" else "admin-key"] == "1234"


def test_header_of_a_call_stands_in_place_of_the_clients_own(server: FakeTriton, way: Way) -> None:
    with way.client(server, headers={"X-Team": "search", "Authorization": "Bearer 7"}) as client:
        client.encode("a", headers={"x-team": "other", "Authorization": "Basic 7"})
    assert (server.seen[0].headers["x-team"], server.seen[0].headers["authorization"]) == ("other", "Basic 7")


def test_questions_that_a_call_asks_on_the_way_carry_its_headers(server: FakeTriton, way: Way) -> None:
    """Of labels and of the width of nothing: a key that the call alone has is needed there, too."""
    own = {"X-Team": "search", "Authorization": "Bearer own"}
    with way.client(server, model="encode_topics", headers=own) as client:
        client.classify("How far", headers={"Authorization": "Bearer call"})
    with way.client(server, headers=own) as client:
        client.encode([], headers={"Authorization": "Bearer call"})
        client.dim()
    assert [(asked["x-team"], asked["authorization"]) for asked in server.asked_with] == [
        ("search", "Bearer call"), ("search", "Bearer call"), ("search", "Bearer own"),
    ]  # fmt: skip


def test_call_carries_the_span_that_is_current(server: FakeTriton, client: Any) -> None:
    from opentelemetry import trace

    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    client.encode("a")
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.encode("a")
        client.encode("a", headers={"traceparent": "mine"})
    assert [seen.headers.get("traceparent") for seen in server.seen] == [
        None, f"00-{0xABC:032x}-{0xDEF:016x}-01", "mine",
    ]  # fmt: skip


def test_call_goes_without_a_trace_where_opentelemetry_is_missing(
    server: FakeTriton, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace.propagation.tracecontext", None)
    client.encode("a")
    assert "traceparent" not in server.seen[0].headers


@pytest.mark.parametrize("asynchronous", [False, True])
def test_http_connections_are_kept_and_shared(server: FakeTriton, asynchronous: bool) -> None:
    with Way("http", asynchronous).client(server, batch=1, concurrency=3) as client:
        for _ in range(5):
            client.encode("a")
        assert server.connections == 1
        server.delay = lambda _: 0.02
        client.encode([str(number) for number in range(12)])
        assert server.connections == 3


def test_http_client_leaves_no_thread_and_no_warning(server: FakeTriton, recwarn: pytest.WarningsRecorder) -> None:
    before = threading.active_count()
    with EncoderClient(server.http_url) as client:
        client.encode(["a"] * 40)
        assert threading.active_count() > before
    assert "encoder-http" not in {thread.name for thread in threading.enumerate()}
    assert [str(one.message) for one in recwarn if "unclosed" in str(one.message).lower()] == []


@pytest.mark.filterwarnings("ignore:a client of:ResourceWarning")
def test_http_client_that_nobody_closes_ends_its_thread_when_it_is_forgotten(server: FakeTriton) -> None:
    def thread() -> bool:
        return "encoder-http" in {one.name for one in threading.enumerate()}

    client = EncoderClient(server.http_url)
    client.encode(["a"] * 40)
    assert thread()
    del client
    gc.collect()
    assert until(lambda: not thread(), 5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_script_that_forgets_to_close_its_client_ends_and_is_told_so_where_warnings_are_shown(
    server: FakeTriton, way: Way
) -> None:
    call = f"client = EncoderClient({way.url(server)!r}); print(len(client.encode(['a'] * 40)))"
    if way.asynchronous:
        call = (
            f"async def main():\n  global client\n  client = AsyncEncoderClient({way.url(server)!r})\n"
            "  print(len(await client.encode(['a'] * 40)))\nasyncio.run(main())"
        )
    script = f"import asyncio\nfrom clients import *\n{call}"
    for shown, warned in (("ignore", False), ("always", str(way) == "http")):
        command = [sys.executable, "-W", f"{shown}::ResourceWarning", "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stdout) == (0, "40\n"), ended.stderr
        assert ("was not closed" in ended.stderr) is warned
        # Under asyncio it is aiohttp that complains, as it does everywhere.
        assert not ended.stderr or way.asynchronous or warned


@pytest.fixture(scope="module", params=[False, True], ids=["server-certificate", "both-certificates"])
def encrypted(request: pytest.FixtureRequest, certificates: Path) -> Iterator[tuple[FakeTriton, bool]]:
    """A server of both protocols with TLS; and whether it asks for the client's certificate."""
    mutual = request.param
    pems = [(certificates / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
    keys = grpc.ssl_server_credentials([(pems[0], pems[1])], pems[2] if mutual else None, mutual)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates / "ca.pem")
    with serve(keys, context) as fake:
        yield fake, mutual


def test_encrypted_server_is_called_with_its_certificates(
    encrypted: tuple[FakeTriton, bool], certificates: Path, way: Way
) -> None:
    server, mutual = encrypted
    own = {"certificate": certificates / "client.pem", "key": certificates / "client.key"} if mutual else {}
    with way.client(server, tls=Tls(root=certificates / "ca.pem", **own)) as client:
        assert client.encode("a").embeddings.shape == (1, DIM)
        assert client.ready()
    named = Tls(root=str(certificates / "ca.pem"), server_name="encoders.example", **own)
    with way.client(server, tls=named) as client:
        assert client.encode("a").embeddings.shape == (1, DIM)


@pytest.mark.parametrize("root", ["other.pem", None])
def test_server_that_nobody_vouches_for_is_not_called(
    encrypted: tuple[FakeTriton, bool], certificates: Path, way: Way, root: str | None
) -> None:
    server, _ = encrypted
    seen = len(server.seen)
    tls = Tls(root=None if root is None else certificates / root)
    with way.client(server, tls=tls) as client, pytest.raises(ServerUnavailable, match="TLS"):
        client.encode("a")
    assert len(server.seen) == seen


def test_plain_client_fails_at_an_encrypted_server(encrypted: tuple[FakeTriton, bool], way: Way) -> None:
    server, _ = encrypted
    with way.client(way.url(server).replace("https", "http")) as client, pytest.raises(EncoderError):
        client.encode("a", deadline=5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answer_that_is_no_http_shows_no_key(asynchronous: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=lambda: silent.accept()[0].sendall(b"\0\0 no HTTP\r\n\r\n"), daemon=True).start()
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Way("http", asynchronous).client(f"http://{url}", headers={"X-Key": "secret"}) as client,
            pytest.raises(ServerFailure, match="not a Triton server") as caught,
        ):
            client.encode("a")
    assert "secret" not in f"{caught.value} {caught.value.value}"


@pytest.mark.parametrize("client", [EncoderClient, AsyncEncoderClient])
@pytest.mark.parametrize("url", ["https://h", "grpcs://h:1"])
def test_file_that_is_no_certificate_is_refused_before_any_request(
    tmp_path: Path, client: type[EncoderClient | AsyncEncoderClient], url: str
) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    with pytest.raises(InvalidInput, match="no PEM"):
        client(url, tls=Tls(root=tmp_path / "no.pem"))


def test_tls_files_are_checked_when_they_are_named(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        Tls(root=tmp_path / "none.pem")
    with pytest.raises(InvalidInput, match="without its key"):
        Tls(certificate=certificates / "client.pem")
