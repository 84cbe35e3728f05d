"""Prometheus from apt with the flags and files of compose's service, and questions to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders.ports import free_ports
from tests.operations.container import compose
from tests.operations.test_image import tool
from tests.tools.repositories import ROOT
from tests.tools.waiting import until


class Prometheus:
    """A running Prometheus.

    Args:
        address: with its port.
    """

    def __init__(self, address: str):
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=text)["result"]
        return found

    def value(self, text: str) -> float:
        """The one value; waits for it, since a rate and a rule have none at first."""
        until(lambda: self.query(text) != [])
        (found,) = self.query(text)
        return float(found["value"][1])

    def answers(self) -> bool:
        try:
            return self.query("vector(1)") != []
        except OSError:
            return False


@contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Prometheus with the files of deploy/, looking every second, until the block ends.

    Args:
        folder: its own.
        targets: file below targets/ and the one port of 127.0.0.1 it names.
    """
    port = free_ports().http
    shutil.copytree(ROOT / "deploy" / "prometheus", folder / "etc")
    for name, target in {**targets, "prometheus.yml": port}.items():
        (folder / "etc" / "targets" / name).write_text(f'- targets: ["127.0.0.1:{target}"]\n', encoding="utf-8")
    config = folder / "etc" / "prometheus.yml"
    text = config.read_text(encoding="utf-8")
    text = text.replace("_interval: 5s", "_interval: 1s").replace("_timeout: 4s", "_timeout: 1s")
    config.write_text(text, encoding="utf-8")
    places = {"/etc/prometheus/": f"{folder}/etc/", "=/prometheus": f"={folder}/data"}
    flags = [str(flag) for flag in compose()["services"]["prometheus"]["command"]]
    for old, new in places.items():
        flags = [flag.replace(old, new) for flag in flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [tool("prometheus", "prometheus (apt)"), *flags, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        started = Prometheus(f"http://127.0.0.1:{port}")
        assert until(started.answers), (folder / "log").read_text(encoding="utf-8")
        yield started
    finally:
        process.terminate()
        process.wait(20)
