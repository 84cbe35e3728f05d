"""Memory of a server without a GPU, process by process, after batches of every length (docs/guide.md, sizing)."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from builders.ports import free_ports
from builders.server import TritonServer
from clients import EncoderClient
from tests.texts import mixed_texts
from tests.tools.footprint import Footprint, footprint
from tests.tools.repositories import repository


def main() -> None:
    """Build, serve, fill batches of every bucket, and print a row for each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="deploy.cpu.yaml", help="settings file of this repository")
    parser.add_argument("--texts", type=int, default=200, help="of mixed lengths, then 32 of each length")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = repository(Path(folder), options.config)
        with TritonServer(built.repository, built.models, ports=free_ports()) as server:
            with EncoderClient(server.grpc_url) as client:
                client.encode(mixed_texts(options.texts, seed=1))
                for words in (5, 12, 30, 60, 120, 250, 500):
                    client.encode(["moon " * words] * 32)
            assert server.pid is not None
            _show(footprint(server.pid, server._shm_prefix))


def _show(found: Footprint) -> None:
    print(f"| {'process':<16} | own MiB |\n|---|---|")
    print(f"| {'tritonserver':<16} | {found.server.own:7.0f} |")
    for name, own in sorted(found.instances.items()):
        print(f"| {name:<16} | {own:7.0f} |")
    print(f"together {found.server.pss + found.models.pss:.0f} MiB with their libraries, {found.shared:.0f} MiB shared")


if __name__ == "__main__":
    main()
