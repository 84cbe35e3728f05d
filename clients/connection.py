"""Where a client connects and what it shows there: the address, TLS, keys."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from clients.errors import InvalidInput

Protocol = Literal["grpc", "http"]

_FORM = "host:port or grpc[s]://host:port for gRPC, http[s]://host:port for HTTP"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_GRPC_RESOLVERS = ("dns", "ipv4", "ipv6", "unix", "passthrough", "xds")
_HEADER = re.compile(r"[A-Za-z0-9_.-]+")
# Triton reads a restricted protocol's key from a gRPC header of this beginning, and from the bare one over HTTP:
# its docs/customization_guide/inference_protocols.md, "Limit Endpoint Access".
_RESTRICTED_GRPC = "triton-grpc-protocol-"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of an encrypted connection; the server's is always checked.

    Args:
        root: PEM file with the certificates that vouch for the server; left out, those the system trusts (gRPC: those
            that grpcio carries).
        certificate: PEM file with the client's own certificate chain, for a server that asks for one.
        key: PEM file with its private key; both or neither.
        server_name: the name to look for in the server's certificate when it is not the host of the url.

    Raises:
        InvalidInput: a file cannot be read, or `certificate` and `key` are not given together.

    Example:
        >>> from clients import EncoderClient, Tls
        >>> client = EncoderClient("encoders.example:8001", tls=Tls(root="ca.pem"))  # doctest: +SKIP
    """

    root: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Checks that the files are there; their content is checked when they are used."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("tls names a certificate without its key, or a key without its certificate")
        for path in (self.root, self.certificate, self.key):
            if path is not None:
                _read(path)

    def pems(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of `root`, `key` and `certificate`, as gRPC takes them."""
        return tuple(None if path is None else _read(path) for path in (self.root, self.key, self.certificate))  # type: ignore[return-value]

    def context(self) -> ssl.SSLContext:
        """The same for HTTPS.

        Raises:
            InvalidInput: a file is not what it should be.
        """
        try:
            context = ssl.create_default_context(cafile=None if self.root is None else str(self.root))
            if self.certificate is not None:
                context.load_cert_chain(str(self.certificate), None if self.key is None else str(self.key))
        except (ssl.SSLError, OSError) as error:
            raise InvalidInput("a file of tls is no PEM of the right kind", value=str(error)) from None
        return context


def _read(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput("a file of tls cannot be read", value=str(path), limit=error.strerror) from None


@dataclass(frozen=True, slots=True)
class Address:
    """A server, as the transports take it."""

    protocol: Protocol
    url: str
    """As the client was given it, for messages."""
    target: str
    """gRPC: the target, host:port; HTTP: the base url without a slash at its end."""
    tls: Tls | None
    """None: not encrypted."""


def parse_address(url: str, transport: Protocol | None, tls: Tls | None) -> Address:
    """Reads protocol and encryption off the url; `transport` decides where it has no scheme.

    Raises:
        InvalidInput: the url has another scheme, no host, or contradicts `transport` or `tls`.
    """
    if transport not in (None, "grpc", "http"):
        raise InvalidInput("unknown transport", value=transport, limit="'grpc' or 'http', or None: the url decides")
    if not isinstance(url, str) or not url or url != url.strip():
        raise InvalidInput("url is not an address", value=url, limit=_FORM)
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    protocol: Protocol
    if scheme in ("http", "https"):
        protocol = "http"
    elif scheme in ("", "grpc", "grpcs", *_GRPC_RESOLVERS):
        protocol = "grpc" if scheme else transport or "grpc"
    else:
        raise InvalidInput("url has an unknown scheme", value=url, limit=_FORM)
    if transport not in (None, protocol):
        raise InvalidInput(f"url and transport={transport!r} contradict each other", value=url, limit=_FORM)
    if tls is not None and scheme in ("http", "grpc"):
        raise InvalidInput(f"tls is given, but the url's scheme {scheme!r} is not encrypted", value=url, limit=_FORM)
    if tls is None and scheme in ("https", "grpcs"):
        tls = Tls()
    if protocol == "grpc":
        target = url if scheme in _GRPC_RESOLVERS else url.removeprefix(f"{found[0] if found else ''}")
        return Address(protocol, url, _with_host(target.rstrip("/"), url), tls)
    base = url if scheme else f"{'http' if tls is None else 'https'}://{url}"
    try:
        parts = urlsplit(base)
        whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        whole = False
    if not whole or parts.query or parts.fragment:
        raise InvalidInput("url is not an HTTP address", value=url, limit=_FORM)
    return Address(protocol, url, base.rstrip("/"), tls)


def _with_host(target: str, url: str) -> str:
    if not target:
        raise InvalidInput("url names no host", value=url, limit=_FORM)
    return target


Headers = tuple[tuple[str, str], ...]


def check_headers(headers: Mapping[str, str] | None) -> Headers:
    """Headers in lower case, as gRPC wants them.

    Raises:
        InvalidInput: a name or a value cannot be a header of both protocols.
    """
    checked = []
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _HEADER.fullmatch(name) or name.lower().endswith("-bin"):
            raise InvalidInput(
                "a header's name is wrong", value=name, limit="ASCII letters, digits, - _ . and no -bin at the end"
            )
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            # The value may be a secret: it is not shown.
            raise InvalidInput(f"the value of header {name!r} is wrong", limit="printable ASCII text")
        checked.append((name.lower(), value))
    return tuple(checked)


def key_headers(
    protocol: Protocol,
    headers: Mapping[str, str] | None,
    token: str | None,
    restricted_key: tuple[str, str] | None,
) -> Headers:
    """The headers of every request of a client: its own, a bearer token, a key for Triton's restricted protocols."""
    keys: dict[str, str] = dict(headers or {})
    if token is not None:
        keys["authorization"] = f"Bearer {token}"
    if restricted_key is not None:
        name, value = restricted_key
        keys[f"{_RESTRICTED_GRPC if protocol == 'grpc' else ''}{name}"] = value
    return check_headers(keys)
