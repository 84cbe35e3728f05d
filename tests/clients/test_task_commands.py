"""The commands of the tasks beside `encode`, through typer's runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clients.cli import app
from tests.clients.fake_triton import FakeTriton


def lines(*arguments: str, code: int = 0) -> list[Any]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(params=["grpc", "http"])
def at(request: pytest.FixtureRequest, server: FakeTriton) -> list[str]:
    return ["--url", server.url if request.param == "grpc" else server.http_url]


def test_classify_prints_the_best_labels_first(at: list[str]) -> None:
    (line,) = lines("classify", *at, "--model", "encode_topics", "--top-k", "2", "Where is it?")
    assert line == {
        "text": "Where is it?", "tokens": 12, "cut": 1,
        "labels": [{"label": "place", "score": 0.6}, {"label": "number", "score": 0.1}],
    }  # fmt: skip


def test_rerank_prints_documents_the_best_first(at: list[str], tmp_path: Path) -> None:
    (tmp_path / "documents").write_text("Paris\nthe moon is far\n")
    arguments = ["--model", "encode_rerank", "--file", str(tmp_path / "documents")]
    given = lines("rerank", *at, *arguments, "how far is the moon")
    assert [(one["index"], one["document"]) for one in given] == [(1, "the moon is far"), (0, "Paris")]
    assert len(lines("rerank", *at, *arguments, "--top-n", "1", "far")) == 1


def test_similarity_prints_the_cosine_of_each_text(at: list[str]) -> None:
    first, second = lines("similarity", *at, "a", "a", "b")
    assert (first["text"], first["cosine"]) == ("a", pytest.approx(1, abs=1e-5))
    assert second["cosine"] < 0.999


def test_tag_prints_entities(at: list[str], server: FakeTriton) -> None:
    (line,) = lines("tag", *at, "--model", "encode_names", "--aggregation", "max", "Ada", "--truncate", "chunk")
    assert line["entities"] == [{"label": "PER", "score": 0.9, "word": "Ada", "start": 0, "end": 3}]
    assert (server.seen[0].parameters["aggregation"], server.seen[0].parameters["truncate"]) == ("max", "chunk")


def test_answer_prints_the_span_of_each_context(at: list[str]) -> None:
    (line,) = lines("answer", *at, "--model", "encode_answers", "Where?", "Ada lives in Paris")
    assert line == {"context": "Ada lives in Paris", "text": "Paris", "score": 0.8, "start": 13, "end": 18}


def test_keys_and_headers_are_sent(at: list[str], server: FakeTriton) -> None:
    lines("tag", *at, "--model", "encode_names", "--token", "t", "--header", "X-Team: search", "a")
    assert (server.seen[0].headers["authorization"], server.seen[0].headers["x-team"]) == ("Bearer t", "search")
    lines("tag", *at, "--header", "no colon", "a", code=2)


def test_error_of_a_task_names_the_line_of_the_file(at: list[str], server: FakeTriton, tmp_path: Path) -> None:
    import grpc

    server.fail = lambda texts: (grpc.StatusCode.INVALID_ARGUMENT, "text 1 is too long")
    (tmp_path / "texts").write_text("a\nb\n")
    done = CliRunner().invoke(app, ["tag", *at, "--model", "encode_names", "--file", str(tmp_path / "texts")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'texts'}, line 2: text 1 is too long")
