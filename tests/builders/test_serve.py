"""The command `serve` as a process: what it prints, its exit codes, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from builders.errors import ServerError
from builders.ports import Ports, free_ports
from builders.serve import sample_request, serve
from tests.builders.test_server import processes_of, tiny_repository
from tests.tools.waiting import until


@contextmanager
def serving(repository: Path, ports: Ports, extra: str = "") -> Iterator[subprocess.Popen[str]]:
    """`serve` of the model `probe` in a process of its own, killed at the end if it is still there."""
    program = f"""
        import sys
        from pathlib import Path
        from builders.ports import Ports
        from builders.access import Access
        from builders.canary import CanarySettings
        from builders.serve import serve
        from builders.supervisor import SupervisorSettings
        sys.exit(serve(Path({str(repository)!r}), ["probe"], {ports!r}, "127.0.0.1",
                       log_path=Path("{repository}/triton.log"), {extra}))
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        assert until(lambda: processes_of(repository) == [])


def printed_until(process: subprocess.Popen[str], sign: str) -> str:
    """What the process prints up to the line that holds `sign`."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if sign in line:
            return text
    raise AssertionError(f"no {sign!r} in:\n{text}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tells_the_start_and_exits_0_with_nothing_left_when_it_is_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    ports = free_ports()
    with serving(tiny_repository(tmp_path), ports) as process:
        text = printed_until(process, "Ctrl-C stops")
        assert re.search(r"loading  probe, version 1\n.*loaded   probe  \d+\.\d s", text)
        assert re.search(r"ready    after \d+\.\d s", text)
        assert f"http://127.0.0.1:{ports.http}" in text
        assert len(processes_of(tmp_path)) == 2
        with urllib.request.urlopen(re.findall(r"curl -s (\S+)", text)[0], timeout=5) as answer:  # noqa: S310
            assert json.load(answer)["name"] == "probe"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=10)
        assert process.returncode == 0
        assert rest.startswith("stopping: in-flight requests are answered")
        assert rest.endswith("unloaded probe, version 1\nstopped\n")
        assert processes_of(tmp_path) == []


def test_every_line_is_a_json_object_when_the_log_is_asked_for_as_json(tmp_path: Path) -> None:
    with serving(tiny_repository(tmp_path), free_ports(), "as_json=True") as process:
        text = printed_until(process, "Ctrl-C stops")
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=10)
        assert process.returncode == 0
    lines = [json.loads(line) for line in (text + rest).splitlines()]
    assert {line["source"] for line in lines} == {"serve"}
    (loaded,) = [line for line in lines if line.get("event") == "loaded"]
    assert (loaded["level"], loaded["model"]) == ("info", "probe")
    assert lines[-1]["message"] == "stopped"


def test_exits_1_with_the_reason_when_the_model_fails(tmp_path: Path) -> None:
    tiny_repository(tmp_path, initialize='raise RuntimeError("[no] such file")')
    with serving(tmp_path, free_ports()) as process:
        text, _ = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "model 'probe' version 1: RuntimeError: [no] such file" in text
        assert "Traceback" not in text


def test_exits_1_when_the_server_dies_by_itself(tmp_path: Path) -> None:
    with serving(tiny_repository(tmp_path), free_ports()) as process:
        text = printed_until(process, "Ctrl-C stops")
        os.kill(int(re.findall(r"tritonserver (\d+):", text)[0]), signal.SIGKILL)
        rest, _ = process.communicate(timeout=10)
        assert process.returncode == 1
        assert "killed by SIGKILL" in rest


def test_exits_0_when_it_is_interrupted_while_loading(tmp_path: Path) -> None:
    with serving(tiny_repository(tmp_path, initialize="time.sleep(1)"), free_ports()) as process:
        printed_until(process, "loading")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=15)
        assert process.returncode == 0, rest


def test_kills_when_it_is_interrupted_twice(tmp_path: Path) -> None:
    with serving(tiny_repository(tmp_path), free_ports()) as process:
        printed_until(process, "Ctrl-C stops")
        process.send_signal(signal.SIGINT)
        printed_until(process, "stopping")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=5)
        assert process.returncode == 1
        assert "killed" in rest


def test_heals_a_dead_model_process_and_shows_it_on_the_health_port(tmp_path: Path) -> None:
    ports, health = free_ports(), free_ports().http
    extra = f"""health_port={health}, drain_models=["probe"], events_path=Path("{tmp_path}/events"),
                       access=Access(("control", "secret")),
                       supervision=SupervisorSettings(canary=CanarySettings(0.5, 2.0))"""

    def get(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with serving(tiny_repository(tmp_path, initialize="time.sleep(0.5)"), ports, extra) as process:
        printed_until(process, "loading")
        # The process is there, the model is not yet.
        assert (get("/healthz"), get("/readyz")) == (200, 503)
        text = printed_until(process, "Ctrl-C stops")
        assert f"health   http://127.0.0.1:{health}/readyz" in text
        assert until(lambda: get("/readyz") == 200)
        time.sleep(1.2)
        (stub,) = [each for each in processes_of(tmp_path) if "stub" in each.name() or "stub" in each.cmdline()[0]]
        stub.kill()
        text = printed_until(process, "healed")
        assert "error    probe: a process of this model died (probe_0_0)" in text
        assert until(lambda: get("/readyz") == 200)
        assert (get("/healthz"), get("/metrics")) == (200, 200)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0, rest
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["model"] for event in told if event["kind"] == "healed"] == ["probe"]
    assert all(event["time"].endswith("+00:00") for event in told)


def test_raises_before_anything_runs_when_the_model_is_unknown(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ServerError, match="one of probe"):
        serve(tiny_repository(tmp_path), ["other"], free_ports(), "127.0.0.1")
    assert signal.getsignal(signal.SIGINT) is handler


def test_samples_a_text_when_the_entry_is_served() -> None:
    words = shlex.split(sample_request("http://127.0.0.1:8000", "encode"))
    assert words[2] == "http://127.0.0.1:8000/v2/models/encode/infer"
    assert json.loads(words[-1])["inputs"][0]["shape"] == [1, 1]


def test_samples_the_named_entry_and_a_pair_where_it_takes_nothing_else() -> None:
    words = shlex.split(sample_request("http://127.0.0.1:8000", "encode_topics", paired=True))
    assert words[2] == "http://127.0.0.1:8000/v2/models/encode_topics/infer"
    assert [tensor["name"] for tensor in json.loads(words[-1])["inputs"]] == ["TEXT", "TEXT_PAIR"]
    assert sample_request("http://127.0.0.1:8000", "encoder_16").endswith("/v2/models/encoder_16/config")
