"""`make demo` and `make serve` as a user runs them, without the virtual environment's set-up."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builders.access import read_key
from builders.http_api import HttpApi
from builders.ports import free_ports
from tests.texts import mixed_texts
from tests.tools.load import Call, open_loop
from tests.tools.repositories import ROOT, settings_file

#: Where the commands' repository is built, with the accuracy gate. It stays, as that of `make demo` does: the demo that
#: is timed runs alone, in a session of its own, and should not have to build it again.
KEPT = ROOT / "build" / "tests" / "commands"
CACHE = ("--cache", str(ROOT / "build" / "cache"))


@pytest.fixture(scope="module")
def folder() -> Path:
    """One repository for all commands: the first one builds it, the others find it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    return KEPT


def run(command: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "builders", command, "--config", str(settings_file(folder, "deploy.cpu.yaml"))]
    done = subprocess.run([*words, *CACHE], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done


def check_demo(done: subprocess.CompletedProcess[str]) -> None:
    for text in ("interactive", "background", "nearest to", "14 answered, 1 refused", "stopped"):
        assert text in done.stdout
    nearest = done.stdout.split("nearest to")[1].splitlines()[2]
    assert re.search(r"0\.\d+ +Press Ctrl-C", nearest)


def test_demo_builds_and_prints_the_answers_when_nothing_is_there(folder: Path) -> None:
    shutil.rmtree(folder / "model_repository", ignore_errors=True)
    done = run("demo", folder, 300)
    assert "published version 1" in done.stderr
    check_demo(done)


@pytest.mark.alone
def test_demo_prints_the_answers_and_stops_in_20_seconds_when_run_again(folder: Path) -> None:
    run("build", folder, 180)
    began = time.monotonic()
    done = run("demo", folder, 60)
    assert time.monotonic() - began < 20
    assert "up to date" in done.stderr
    check_demo(done)


def test_serve_answers_until_interrupted_and_leaves_nothing(folder: Path) -> None:
    ports = free_ports()
    config = settings_file(folder, "deploy.cpu.yaml")
    command = [
        sys.executable, "-m", "builders", "serve", "--config", str(config), *CACHE,
        "--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if str(ports.grpc) in line:
                break
        ready = f"http://127.0.0.1:{ports.http}/v2/models/encode/ready"
        with urllib.request.urlopen(ready, timeout=10) as answer:
            assert answer.status == 200
        # What changes the server needs the key, which nobody gave and which lies where promote looks for it.
        repository = folder / "model_repository"
        assert read_key(repository) is not None
        assert HttpApi("127.0.0.1", ports.http).ask("POST", "/v2/repository/models/encode/unload")[0] == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 0
    assert "encoder_32" in "".join(lines)
    assert read_key(repository) is None


def test_command_says_what_is_wrong_in_one_line_when_the_settings_are_bad(tmp_path: Path) -> None:
    config = settings_file(tmp_path, "deploy.cpu.yaml", entry={"proceses": 2})
    command = [sys.executable, "-m", "builders", "render", "--config", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "did you mean processes?" in done.stderr
    assert "Traceback" not in done.stderr


def test_accepted_requests_are_answered_when_serve_is_interrupted_under_load(folder: Path) -> None:
    ports = free_ports()
    level = {"timeout_ms": 60_000, "queue_size": 1000}
    config = settings_file(folder, "deploy.cpu.yaml", entry={"interactive": level, "background": level})
    command = [
        sys.executable, "-m", "builders", "serve", "--config", str(config), *CACHE,
        "--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--metrics-port", str(ports.metrics),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if str(ports.grpc) in line:
                break
        with ThreadPoolExecutor(1) as pool:
            calls = [Call((text,)) for text in mixed_texts(80, seed=9)]
            running = pool.submit(open_loop, f"127.0.0.1:{ports.grpc}", calls)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            samples = running.result(timeout=60)
        assert process.wait(timeout=40) == 0
    assert [sample.error for sample in samples if sample.error] == []
