"""What README shows is what happens: its examples run against the real server, its settings table is the settings'."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from builders.server import TritonServer
from builders.settings import DeploySettings
from builders.settings.reference import settings_table
from tests.tools.repositories import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: README's models of the tasks, and those of test_tasks.py, where these examples run.
TASK_MODELS = {
    "encode_sentiment": "encode_classification",
    "encode_reranker": "encode_reranking",
    "encode_tagger": "encode_tagging",
    "encode_answers": "encode_answering",
    "encode_search": "encode_embedding",
}


#: Where the examples have the door; they run in test_door.py and test_tasks.py.
DOOR = "127.0.0.1:8080"


def blocks(language: str, *, of_tasks: bool = False, of_door: bool = False, page: str = README) -> list[str]:
    """A page's examples in a language: those of the default model, or those of models of other tasks.

    Args:
        language: as the page marks it.
        of_tasks: those that name a model of `TASK_MODELS`, instead of the others.
        of_door: those that call the door, instead of Triton.
        page: README, or another one.
    """
    found = re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)
    return [
        block
        for block in found
        if any(name in block for name in TASK_MODELS) == of_tasks and (DOOR in block) == of_door
    ]


def at(code: str, server: TritonServer) -> str:
    return code.replace("127.0.0.1:8001", server.grpc_url).replace("http://127.0.0.1:8000", server.http_url)


def test_settings_table_is_the_settings_own() -> None:
    shown = re.search(r"<!-- settings: .*?-->\n(.*?)<!-- /settings -->", README, flags=re.S)
    assert shown is not None
    assert shown.group(1) == settings_table(DeploySettings)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_example_runs(cpu_server: TritonServer, number: int) -> None:
    code = at(blocks("python")[number], cpu_server)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "384)" in done.stdout


def test_curl_example_runs(cpu_server: TritonServer) -> None:
    (code,) = [block for block in blocks("sh") if block.startswith("curl")]
    done = subprocess.run(  # noqa: S602 - README's own example
        at(code, cpu_server), shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    outputs = {output["name"]: output for output in json.loads(done.stdout)["outputs"]}
    assert outputs["EMBEDDING"]["shape"] == [1, 384]
    assert outputs["TOKENS"]["data"] == [8]


def test_command_line_example_runs(cpu_server: TritonServer) -> None:
    command = [sys.executable, "-m", "clients", "encode", "How far is the moon?", "--url", cpu_server.grpc_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 8


def test_every_make_target_of_the_readme_exists() -> None:
    named = set(re.findall(r"make ([a-z-]+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
