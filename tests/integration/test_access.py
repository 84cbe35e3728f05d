"""Every door of the server that the key or TLS closes, against the real one: shut without, open with."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builders.access import Access, ClientTls
from builders.control import ModelControl
from builders.errors import ControlError, RestrictedError
from builders.http_api import HttpApi
from builders.ports import free_ports
from builders.server import TritonServer
from clients import EncoderClient, InvalidInput, Tls
from tests.builders.test_server import tiny_repository

KEY = ("control", "secret")
HEADERS = {"triton-grpc-protocol-control": "secret"}
LOCAL, OTHER_LOCAL = "127.0.0.1", "127.0.0.2"

GRPC_DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda client, headers: client.get_model_repository_index(headers=headers),
    "load": lambda client, headers: client.load_model("probe", headers=headers),
    "system shared memory": lambda client, headers: client.get_system_shared_memory_status(headers=headers),
    "forget shared memory": lambda client, headers: client.unregister_system_shared_memory(headers=headers),
    "CUDA shared memory": lambda client, headers: client.get_cuda_shared_memory_status(headers=headers),
    "trace": lambda client, headers: client.get_trace_settings(headers=headers),
    "trace file": lambda client, headers: client.update_trace_settings(settings={"trace_rate": "7"}, headers=headers),
    "log": lambda client, headers: client.get_log_settings(headers=headers),
    "log level": lambda client, headers: client.update_log_settings(settings={"log_info": True}, headers=headers),
}
HTTP_DOORS = [
    ("POST", "/v2/repository/index", None),
    ("POST", "/v2/repository/models/probe/load", None),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("POST", "/v2/systemsharedmemory/unregister", None),
    ("GET", "/v2/cudasharedmemory/status", None),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/trace/setting", {"trace_rate": "7"}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {"log_info": True}),
]


@dataclass(frozen=True)
class Papers:
    """PEM files: an authority, the server's and a client's certificate with their keys, and a stranger's authority."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    stranger: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("papers")

    def openssl(*arguments: str) -> None:
        subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)

    def authority(name: str) -> None:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip

    authority("ca")
    authority("stranger")
    (folder / "names").write_text(f"subjectAltName=DNS:localhost,IP:{LOCAL},IP:{OTHER_LOCAL}")
    for name in ("server", "client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    files = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key", "stranger.pem")
    return Papers(*(folder / file for file in files))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_repository(tmp_path_factory.mktemp("doors"))


@pytest.fixture(scope="module")
def locked(repository: Path) -> Iterator[TritonServer]:
    """A server with a key, in the clear."""
    with TritonServer(repository, ["probe"], ports=free_ports(), access=Access(KEY)) as server:
        yield server


@pytest.fixture(scope="module")
def sealed(repository: Path, papers: Papers) -> Iterator[TritonServer]:
    """A server with a key and mutual TLS, on all addresses."""
    access = Access(KEY, papers.server, papers.server_key, papers.ca)
    with TritonServer(repository, ["probe"], ports=free_ports(), host="0.0.0.0", access=access) as server:  # noqa: S104
        yield server


@pytest.mark.parametrize("door", GRPC_DOORS)
def test_grpc_door_is_shut_without_the_key_and_open_with_it(locked: TritonServer, door: str) -> None:
    with grpc.InferenceServerClient(locked.grpc_url) as client:
        for headers in (None, {"triton-grpc-protocol-control": "guess"}, {"control": "secret"}):
            with pytest.raises(InferenceServerException, match="is restricted, expecting header"):
                GRPC_DOORS[door](client, headers)
        GRPC_DOORS[door](client, HEADERS)


@pytest.mark.parametrize(("method", "path", "body"), HTTP_DOORS, ids=[f"{m} {p}" for m, p, _ in HTTP_DOORS])
def test_http_door_is_shut_without_the_key_and_open_with_it(
    locked: TritonServer, method: str, path: str, body: object
) -> None:
    for headers in ({}, {"control": "guess"}, {"triton-grpc-protocol-control": "secret"}):
        status, answer = HttpApi(LOCAL, locked.ports.http, headers).ask(method, path, body)
        assert status == 403
        assert "restricted" in answer["error"]
    status, _ = locked.http.ask(method, path, body)
    assert status == 200


def test_health_metadata_statistics_and_inference_stay_open_without_the_key(locked: TritonServer) -> None:
    api = HttpApi(LOCAL, locked.ports.http)
    for path in ("/v2/health/ready", "/v2/models/probe/ready", "/v2/models/probe", "/v2/models/probe/stats"):
        assert api.ask("GET", path)[0] == 200
    seconds = {"name": "SECONDS", "datatype": "FP32", "shape": [1], "data": [0.0]}
    assert api.ask("POST", "/v2/models/probe/infer", {"inputs": [seconds]})[0] == 200


def test_control_needs_the_key_and_says_so(locked: TritonServer) -> None:
    with ModelControl(locked.grpc_url) as control, pytest.raises(RestrictedError, match="--control-key"):
        control.load("probe")
    with ModelControl(locked.grpc_url, key=KEY) as control:
        control.load("probe")


def test_client_is_let_in_when_both_sides_show_their_certificate(sealed: TritonServer, papers: Papers) -> None:
    tls = ClientTls(papers.ca, papers.client, papers.client_key)
    with ModelControl(f"{LOCAL}:{sealed.ports.grpc}", key=KEY, tls=tls) as control:
        assert control.ready_versions("probe") == (1,)
    with (
        EncoderClient(
            f"localhost:{sealed.ports.grpc}",
            model="probe",
            tls=Tls(papers.ca, papers.client, papers.client_key),
        ) as client,
        # It reached the model, which is no encoder.
        pytest.raises(InvalidInput, match="TEXT"),
    ):
        client.encode("hello")


@pytest.mark.parametrize("lack", ["TLS", "certificate", "the right authority"])
def test_client_is_kept_out_when_it_lacks(sealed: TritonServer, papers: Papers, lack: str) -> None:
    tls = {
        "TLS": None,
        "certificate": ClientTls(papers.ca),
        "the right authority": ClientTls(papers.stranger, papers.client, papers.client_key),
    }[lack]
    address = f"{LOCAL}:{sealed.ports.grpc}"
    with ModelControl(address, key=KEY, tls=tls, timeout_s=3) as control, pytest.raises(ControlError):
        control.index()


def test_http_listens_on_this_machine_alone_when_grpc_speaks_tls(sealed: TritonServer) -> None:
    # The rest of 127.0.0.0/8 stands for the network: a server on 0.0.0.0 answers there as well.
    with socket.create_connection((OTHER_LOCAL, sealed.ports.grpc), timeout=3):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((OTHER_LOCAL, sealed.ports.http), timeout=3)
    assert sealed.http.ask("GET", "/v2/health/ready")[0] == 200
