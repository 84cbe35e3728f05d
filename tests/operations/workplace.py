"""A checkout of the test's own, in which the commands of docs/guide.md are typed as they stand.

Its code is this checkout's; its default settings serve a tiny model in two buckets, its `python` and `make` use this
Python, and the ports of the page are exchanged for free ones.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from builders.ports import free_ports
from tests.tools.repositories import ROOT
from tests.tools.tiny import LIMIT, tiny_model

_LINKED = ("Makefile", "builders", "clients", "constraints.txt", "docker", "pyproject.toml", "tests")
_PAGE_PORTS = (8000, 8001, 8002, 8003, 9090)
#: Variables that would change what a command does.
_OURS = re.compile(r"(DEPLOY|HOST|LOG_FORMAT|CONTROL_KEY|TLS_.*|(HTTP|GRPC|METRICS|HEALTH)_(PORT|URL)|HF_.*)")


class Workplace:
    """The folder, its ports, and what runs in it.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in _LINKED:
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        # A look a second, so that rates are there soon.
        config = folder / "deploy" / "prometheus" / "prometheus.yml"
        text = config.read_text(encoding="utf-8").replace("_interval: 5s", "_interval: 1s")
        config.write_text(text.replace("_timeout: 4s", "_timeout: 1s"), encoding="utf-8")
        for path in ROOT.glob("deploy*.yaml"):
            shutil.copy(path, folder)
        (folder / "deploy.cpu.yaml").rename(folder / "deploy.real.cpu.yaml")
        self.model = tiny_model(folder / "tiny", "embedding")
        settings = {
            "extends": "deploy.real.cpu.yaml",
            "model": {"source": str(self.model), "max_tokens": LIMIT},
            "buckets": [LIMIT // 2, LIMIT],
            "lanes": {"short": {"late_from": None}},
        }
        (folder / "deploy.cpu.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        (folder / "deploy.before.yaml").write_text(
            yaml.safe_dump({"extends": "deploy.cpu.yaml", "entry": {"window_ms": 5.0}}), encoding="utf-8"
        )
        self._texts()
        binaries = folder / ".venv" / "bin"
        binaries.mkdir(parents=True)
        (binaries / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
        (binaries / "python").chmod(0o755)
        # The environment is there: make installs nothing.
        for name in (".product", ".bench", ".dev"):
            (folder / ".venv" / name).touch()
        first, second = free_ports(), free_ports()
        self.ports = dict(
            zip(_PAGE_PORTS, (first.http, first.grpc, first.metrics, second.http, second.grpc), strict=True)
        )
        #: Commands that were run.
        self.done: set[str] = set()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def _texts(self) -> None:
        """The files that the page says are one's own."""
        words = ["moon", "earth", "sun", "star", "sea", "hill", "rain", "wind", "stone", "leaf"]
        sentences = [" ".join(words[(at + step) % 10] for step in range(1 + at % 7)) for at in range(240)]
        (self.folder / "my.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
        for name, own in (("my.csv", sentences[:120]), ("my-other.csv", sentences[120:])):
            lines = [f"{text} {number},{('day', 'night')[number % 2]}" for number, text in enumerate(own)]
            (self.folder / name).write_text("text,label\n" + "\n".join(lines) + "\n", encoding="utf-8")

    def new_model(self) -> None:
        """The same model, trained on: other numbers in its files."""
        from safetensors.numpy import load_file, save_file

        (path,) = self.model.rglob("model.safetensors")
        save_file({name: value * 1.01 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})

    def typed(self, command: str) -> str:
        """A command with this place's ports; clients have no variable for an address, so they are told."""
        for page, own in self.ports.items():
            command = re.sub(rf"(?<![\w.]){page}(?!\w)", str(own), command)
        if re.match(r"python -m clients (encode|status)\b", command):
            command += f" --url 127.0.0.1:{self.ports[8001]}"
        if command.startswith("python -m clients status"):
            command += f" --metrics http://127.0.0.1:{self.ports[8002]}/metrics"
        return command

    def run(self, command: str, timeout_s: float = 1200.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; both outputs in `stdout`."""
        command = self.typed(command)
        with subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],  # noqa: S607
            cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                # Not a kill at first: what it has started must go too.
                self._interrupt(process)
                raise
        return subprocess.CompletedProcess(command, process.returncode, output)

    def start(self, name: str, command: str, is_ready: Callable[[str], bool], timeout_s: float = 180.0) -> Path:
        """Start a command that stays, and wait until it is ready.

        Args:
            name: to stop it by.
            command: of the page.
            is_ready: told all that it has printed so far.
            timeout_s: seconds.

        Returns:
            The file that it prints into.
        """
        assert name not in self._running
        output = self.folder / f"{name}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", self.typed(command)],  # noqa: S607
                cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running[name] = process
        deadline = time.monotonic() + timeout_s
        while not is_ready(text := output.read_text(encoding="utf-8", errors="replace")):
            assert process.poll() is None, f"{command} ended with {process.returncode}:\n{text[-4000:]}"
            assert time.monotonic() < deadline, f"{command} is not ready:\n{text[-4000:]}"
            time.sleep(0.1)
        return output

    def is_running(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def stop(self, name: str) -> None:
        """Ctrl-C, as in the terminal, and wait for the end."""
        process = self._running.pop(name, None)
        if process is None:
            return
        self._interrupt(process)

    @staticmethod
    def _interrupt(process: subprocess.Popen[Any]) -> None:
        if process.poll() is not None:
            return
        # As a terminal does it: the whole group, make and what make runs.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise

    def ask(self, query: str) -> list[Any]:
        """What Prometheus answers; a query that it refuses is an HTTPError."""
        parameters = urllib.parse.urlencode({"query": query})
        url = f"http://127.0.0.1:{self.ports[9090]}/api/v1/query?{parameters}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    def is_watched(self) -> bool:
        """Whether Prometheus has read the server."""
        try:
            return bool(self.ask('up{job="triton"} == 1'))
        except OSError:
            return False

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _OURS.fullmatch(name)}
        places = [str(self.folder / ".venv" / "bin"), str(Path(sys.executable).parent), kept["PATH"], "/usr/sbin"]
        return kept | {
            "PATH": os.pathsep.join(places),
            "HTTP_PORT": str(self.ports[8000]),
            "GRPC_PORT": str(self.ports[8001]),
            "METRICS_PORT": str(self.ports[8002]),
            "GRPC_URL": f"127.0.0.1:{self.ports[8001]}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
