"""Bad input through the real server: the documented answer, and the good requests beside it untouched."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as aio
from tritonclient.utils import InferenceServerException

from builders.server import TritonServer
from tests.tools.load import text_input


def refusal(server: TritonServer, tensor: Any, **options: Any) -> InferenceServerException:
    with grpc.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("encode", [tensor], **options)
    return caught.value


def test_empty_text_is_answered_with_its_special_tokens(cpu_server: TritonServer) -> None:
    with grpc.InferenceServerClient(cpu_server.grpc_url) as client:
        result = client.infer("encode", [text_input([""])])
    assert result.as_numpy("TOKENS").tolist() == [[2]]
    assert np.isfinite(result.as_numpy("EMBEDDING")).all()


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([b"\xff"], {}, ["text 0", "UTF-8", "0xff"]),
        (["good", b"ab\xc3"], {}, ["text 1", "UTF-8"]),
        (["x" * 1_000_000], {}, ["text 0", "1000000 bytes", "65536", "entry.max_text_bytes"]),
        (["word " * 700], {"parameters": {"truncate": "error"}}, ["702 tokens", "512", "truncate"]),
        (["good"], {"parameters": {"truncate": "middle"}}, ["'middle'", "end", "error"]),
        (["good"] * 33, {}, ["batch-size must be <= 32"]),
    ],
    ids=["not-utf8", "second-not-utf8", "1-MB", "too-long", "unknown-truncate", "33-texts"],
)
def test_request_is_refused_as_invalid_when_it_is_bad(
    cpu_server: TritonServer, texts: list[str | bytes], options: dict[str, Any], words: list[str]
) -> None:
    error = refusal(cpu_server, text_input(texts), **options)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert all(word in error.message() for word in words)


def test_request_is_refused_as_invalid_when_dtype_or_shape_is_wrong(cpu_server: TritonServer) -> None:
    numbers = grpc.InferInput("TEXT", [1, 1], "INT32")
    numbers.set_data_from_numpy(np.array([[1]], dtype=np.int32))
    assert refusal(cpu_server, numbers).status() == "StatusCode.INVALID_ARGUMENT"
    flat = grpc.InferInput("TEXT", [2, 2], "BYTES")
    flat.set_data_from_numpy(np.array([[b"a", b"b"], [b"c", b"d"]], dtype=np.object_))
    error = refusal(cpu_server, flat)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert "shape [2, 2]" in error.message()
    assert "[n, 1]" in error.message()


def test_good_requests_are_untouched_when_bad_ones_share_their_batch(cpu_server: TritonServer) -> None:
    good = [f"a good text, number {number}" for number in range(24)]
    bad: list[str | bytes] = [b"\xff\xfe", "x" * 100_000, b"\xc3("]

    async def run() -> tuple[list[Any], list[Any]]:
        async with aio.InferenceServerClient(cpu_server.grpc_url) as client:
            alone = [await client.infer("encode", [text_input([text])]) for text in good]
            mixed = [*good[:8], bad[0], *good[8:16], bad[1], *good[16:], bad[2]]
            calls = [client.infer("encode", [text_input([text])]) for text in mixed]
            return alone, await asyncio.gather(*calls, return_exceptions=True)

    alone, mixed = asyncio.run(run())
    errors = [item for item in mixed if isinstance(item, Exception)]
    answers = [item for item in mixed if not isinstance(item, Exception)]
    assert [error.status() for error in errors] == ["StatusCode.INVALID_ARGUMENT"] * 3
    assert len(answers) == len(good)
    for one, other in zip(alone, answers, strict=True):
        assert np.allclose(one.as_numpy("EMBEDDING"), other.as_numpy("EMBEDDING"), atol=1e-5)


def test_unusual_texts_are_answered_when_they_are_utf8(cpu_server: TritonServer) -> None:
    unusual = ["Я", "🚲🚲", "a\0b", "\n" * 1000, "שלום עולם", "\u200b", "é" * 400, "中文分词"]
    with grpc.InferenceServerClient(cpu_server.grpc_url) as client:
        result = client.infer("encode", [text_input(unusual)])
    assert np.isfinite(result.as_numpy("EMBEDDING")).all()
    assert result.as_numpy("EMBEDDING").shape == (len(unusual), 384)


def post(server: TritonServer, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{server.http_url}/v2/models/encode/infer", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:  # noqa: S310
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_http_answers_and_refuses_like_grpc_when_asked_in_json(cpu_server: TritonServer) -> None:
    tensor = {"name": "TEXT", "shape": [2, 1], "datatype": "BYTES", "data": ["hello", "world"]}
    status, answer = post(cpu_server, json.dumps({"parameters": {"priority": 1}, "inputs": [tensor]}).encode())
    assert status == 200
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["EMBEDDING"]["shape"] == [2, 384]
    too_long = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["word " * 700]}
    status, answer = post(cpu_server, json.dumps({"parameters": {"truncate": "error"}, "inputs": [too_long]}).encode())
    assert status == 400
    assert "702 tokens" in answer["error"]


def test_good_requests_are_answered_when_one_beside_them_has_unreadable_parameters(cpu_server: TritonServer) -> None:
    tensor = b'"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]}]}'
    bodies = [b'{"parameters": {"x": "\xff"}, ' + tensor, *[b"{" + tensor] * 23]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: post(cpu_server, body), bodies))
    assert [status for status, _ in answers] == [400, *[200] * 23]
    assert "the request cannot be read" in answers[0][1]["error"]


def test_value_is_cut_in_the_message_when_it_is_long(cpu_server: TritonServer) -> None:
    error = refusal(cpu_server, text_input(["good"]), parameters={"truncate": "x" * 100_000})
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert len(error.message()) < 300


def test_http_body_is_refused_when_it_is_no_json(cpu_server: TritonServer) -> None:
    status, answer = post(cpu_server, b"{not json")
    # Triton's own answer, before any model: it calls a bad body an internal error (README, "Errors").
    assert status == 500
    assert "failed to parse the request JSON buffer" in answer["error"]
