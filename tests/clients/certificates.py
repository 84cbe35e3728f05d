"""Certificates for tests of encrypted connections, made by the openssl of the system."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificates(folder: Path) -> Path:
    """ca.pem vouches for server.pem (127.0.0.1) and client.pem, each with its .key; other.pem is a stranger's CA."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S607

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        openssl("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, address in (("server", "IP:127.0.0.1,DNS:encoders.example"), ("client", "DNS:client")):
        (folder / "names").write_text(f"subjectAltName={address}")
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-extfile", "names", "-out", f"{name}.pem",
        )  # fmt: skip
    return folder
