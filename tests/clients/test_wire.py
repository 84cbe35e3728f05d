"""Framing over HTTP: what is made can be read, what is damaged is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tritonclient.utils import deserialize_bytes_tensor

from clients.wire import InferRequest, Query, bytes_tensor, frame, infer_path, read_array, unframe


@given(some.lists(some.binary(max_size=20), max_size=8))
def test_bytes_tensor_is_read_by_tritons_own_client_and_by_ours(items: list[bytes]) -> None:
    tensor = bytes_tensor("TEXT", items)
    assert tensor.shape == (len(items), 1)
    assert list(deserialize_bytes_tensor(tensor.data)) == items
    assert read_array("BYTES", tensor.shape, tensor.data).ravel().tolist() == items


def test_frame_has_the_json_then_the_tensors_in_its_order() -> None:
    inputs = (bytes_tensor("TEXT", [b"ab"]), bytes_tensor("TEXT_PAIR", [b"", b"c"]))
    body, headers = frame(InferRequest("encode", inputs, {"priority": 1}, (("x-key", "v"),)))
    at = int(headers["Inference-Header-Content-Length"])
    head = json.loads(body[:at])
    assert head["parameters"] == {"priority": 1, "binary_data_output": True}
    assert [(one["name"], one["shape"], one["parameters"]) for one in head["inputs"]] == [
        ("TEXT", [1, 1], {"binary_data_size": 6}),
        ("TEXT_PAIR", [2, 1], {"binary_data_size": 9}),
    ]
    assert body[at:] == b"\x02\0\0\0ab" + b"\0\0\0\0\x01\0\0\0c"
    assert headers["x-key"] == "v"


def answer(size: int = 8, shape: tuple[int, ...] = (1, 2), datatype: str = "FP32") -> tuple[bytes, str]:
    output = {"name": "E", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"model_version": "3", "outputs": [output]}).encode()
    return head + np.array([1, 2], np.float32).tobytes(), str(len(head))


def test_answer_is_read() -> None:
    read = unframe(*answer())
    assert read.version == "3"
    assert read.tensors["E"].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("body", "length"),
    [
        answer(size=12),
        answer(size=-4),
        answer(size=4),
        answer(shape=(3, 1)),
        answer(datatype="FP16"),
        answer(datatype="BYTES"),
        (answer()[0], "100000"),
        (answer()[0], "-1"),
        (answer()[0], "x"),
        (answer()[0], None),
        (b"<html>", None),
        (b"[]", None),
        (b"{}", None),
        (b'{"outputs": [{}]}', None),
        (b'{"outputs": [3]}', None),
    ],
)
def test_damaged_answer_is_refused(body: bytes, length: str | None) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is json's, numpy's or our own
        unframe(body, length)
    assert str(caught.value)


def test_names_are_quoted_in_paths() -> None:
    assert infer_path("a/b c") == "/v2/models/a%2Fb%20c/infer"
    assert Query("config", "m", "2").path == "/v2/models/m/versions/2/config"
    assert Query("statistics").path == "/v2/models/stats"
    assert (Query("index").path, Query("index").method) == ("/v2/repository/index", "POST")
