"""What travels: tensors as bytes, one request, its answer, the questions about the server; and how HTTP frames them.

KServe's v2 protocol with Triton's binary tensor extension
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md): raw tensors stand
behind the JSON in the body, in its order, little endian; an item of BYTES has its length before it as 4 bytes. gRPC
carries the same raw tensors in its own message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from clients.connection import Headers

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "INT32": np.dtype("<i4")}
JSON_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input, raw."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


def bytes_tensor(name: str, items: Sequence[bytes]) -> Tensor:
    """BYTES [n, 1] of n items."""
    pieces = [piece for item in items for piece in (struct.pack("<I", len(item)), item)]
    return Tensor(name, "BYTES", (len(items), 1), b"".join(pieces))


def read_array(datatype: str, shape: Sequence[int], data: bytes) -> Array:
    """A raw tensor as an array, a read-only view of `data`; BYTES as an array of bytes objects.

    Raises:
        ValueError: datatype, shape and data do not fit.
    """
    if datatype != "BYTES":
        if datatype not in _DTYPES:
            raise ValueError(f"datatype {datatype} is not one of BYTES, {', '.join(_DTYPES)}")
        return np.frombuffer(data, _DTYPES[datatype]).reshape(shape)
    items, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise ValueError("a BYTES tensor ends within a length")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4 + length
        if at > len(data):
            raise ValueError("a BYTES tensor ends within an item")
        items.append(data[at - length : at])
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request to a model."""

    model: str
    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, str | int]
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """Its answer."""

    version: str
    """Of the model that answered."""
    tensors: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Query:
    """A question about the server or a model, answered as JSON of the v2 protocol."""

    kind: Literal["live", "ready", "server", "metadata", "config", "statistics", "index"]
    model: str = ""
    version: str = ""
    headers: Headers = field(default=())

    @property
    def path(self) -> str:
        """The path over HTTP."""
        model = f"/v2/models/{quote(self.model, safe='')}" if self.model else "/v2/models"
        if self.model and self.version:
            model += f"/versions/{quote(self.version, safe='')}"
        return {
            "live": "/v2/health/live",
            "ready": f"{model}/ready",
            "server": "/v2",
            "metadata": model,
            "config": f"{model}/config",
            "statistics": f"{model}/stats",
            "index": "/v2/repository/index",
        }[self.kind]

    @property
    def method(self) -> str:
        """The method over HTTP."""
        return "POST" if self.kind == "index" else "GET"


def infer_path(model: str) -> str:
    """The path of a request over HTTP."""
    return f"/v2/models/{quote(model, safe='')}/infer"


def frame(request: InferRequest) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request over HTTP."""
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in request.inputs
    ]
    head = json.dumps({"parameters": {**request.parameters, "binary_data_output": True}, "inputs": inputs}).encode()
    headers = {"Content-Type": "application/octet-stream", JSON_LENGTH: str(len(head)), **dict(request.headers)}
    return b"".join([head, *(tensor.data for tensor in request.inputs)]), headers


def unframe(body: bytes, json_length: str | None) -> InferAnswer:
    """The answer in a body over HTTP.

    Args:
        body: the whole body.
        json_length: value of the header Inference-Header-Content-Length; None when there is no binary part.

    Raises:
        ValueError: it is no answer, or tensors and lengths do not fit.
    """
    at = len(body) if json_length is None else int(json_length)
    if not 0 <= at <= len(body):
        raise ValueError(f"{JSON_LENGTH} is {at}, the body has {len(body)} bytes")
    head = json.loads(body[:at])
    tensors: dict[str, Array] = {}
    try:
        for output in head["outputs"]:
            size = int(output["parameters"]["binary_data_size"])
            if size < 0 or at + size > len(body):
                raise ValueError(f"output {output['name']} is beyond the body's end")
            tensors[output["name"]] = read_array(output["datatype"], output["shape"], body[at : at + size])
            at += size
        return InferAnswer(str(head.get("model_version", "")), tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a part of the answer is missing or wrong: {error!r}") from None
