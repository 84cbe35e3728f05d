"""Who may do what with a server: the key of its control APIs, and TLS."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from builders.errors import ServerError

#: What a caller without the key may not use. Loading a model runs its code; shared memory reaches into the server's
#: memory; trace and logging write files where the caller says.
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
#: Holds the key that a start made up, so that promote and rollback on the same machine find it.
KEY_FILE = ".control-key"
_NAME = "control"


@dataclass(frozen=True)
class Access:
    """The doors of one server.

    Attributes:
        key: header name and value that the restricted APIs ask for; None leaves them open.
        certificate: PEM file of the gRPC server's certificate, its chain behind it; turns TLS on.
        private_key: PEM file of its key.
        client_ca: PEM file of the authority whose clients alone are let in (mutual TLS).

    Raises:
        ServerError: a part of TLS is missing, or a file of it cannot be read.
    """

    key: tuple[str, str] | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if (self.certificate is None) != (self.private_key is None):
            raise ServerError(
                "TLS needs a certificate and its private key", value="one of the two",
                remedy="give both --tls-cert and --tls-key",
            )  # fmt: skip
        if self.client_ca is not None and self.certificate is None:
            raise ServerError(
                "clients can be asked for a certificate over TLS alone", remedy="give --tls-cert and --tls-key too"
            )
        for path in (self.certificate, self.private_key, self.client_ca):
            # Triton's own message for a missing file is that the server could not start.
            if path is not None and not os.access(path, os.R_OK):
                raise ServerError(
                    "a file for TLS cannot be read", value=str(path), remedy="correct the path or its mode"
                )

    @property
    def tls(self) -> bool:
        """Whether gRPC speaks TLS; HTTP then listens on this machine alone, because Triton has no TLS there."""
        return self.certificate is not None

    @property
    def http_headers(self) -> Mapping[str, str]:
        """What an HTTP call to a restricted API sends."""
        return {self.key[0]: self.key[1]} if self.key else {}

    def arguments(self) -> list[str]:
        """For tritonserver."""
        found: list[str] = []
        if self.key is not None:
            closed = f"{','.join(RESTRICTED)}:{self.key[0]}={self.key[1]}"
            found += [f"--grpc-restricted-protocol={closed}", f"--http-restricted-api={closed}"]
        if self.tls:
            found += ["--grpc-use-ssl=true", f"--grpc-server-cert={self.certificate}"]
            found += [f"--grpc-server-key={self.private_key}"]
        if self.client_ca is not None:
            found += ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.client_ca}"]
        return found


@dataclass(frozen=True)
class ClientTls:
    """A client's side of TLS.

    Attributes:
        ca: PEM file of the authority that signed the server's certificate.
        certificate: PEM file of the client's own certificate, where the server asks for one.
        private_key: PEM file of its key.

    Raises:
        ServerError: one of the client's own files is missing.
    """

    ca: Path
    certificate: Path | None = None
    private_key: Path | None = None

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if (self.certificate is None) != (self.private_key is None):
            raise ServerError(
                "a client's certificate needs its private key", value="one of the two",
                remedy="give both --tls-client-cert and --tls-client-key",
            )  # fmt: skip

    def files(self) -> Mapping[str, str]:
        """The arguments of tritonclient's gRPC client."""
        named = {
            "root_certificates": self.ca, "certificate_chain": self.certificate, "private_key": self.private_key
        }  # fmt: skip
        return {name: str(path) for name, path in named.items() if path is not None}


@contextmanager
def made_up_key(repository: Path) -> Iterator[tuple[str, str]]:
    """A new random key, in `KEY_FILE` of the repository (readable for this user alone) as long as the block runs.

    Raises:
        ServerError: the file cannot be written.
    """
    path, key = repository / KEY_FILE, (_NAME, secrets.token_urlsafe(24))
    text = f"{key[0]}={key[1]}\n"
    draft = path.with_name(f"{KEY_FILE}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ServerError(
            f"{path} cannot be written: {error}", remedy="give --control-key NAME=VALUE, or make the folder writable"
        ) from None
    try:
        yield key
    finally:
        # A later server of the same repository may have its own key there.
        if read_key(repository) == key:
            path.unlink(missing_ok=True)


def read_key(repository: Path) -> tuple[str, str] | None:
    """The key that a running `serve` of this user made up, or None."""
    try:
        name, _, value = (repository / KEY_FILE).read_text("utf-8").strip().partition("=")
    except OSError:
        return None
    return (name, value) if name and value else None
