"""Malformed requests for the HTTP and the gRPC port, made from a seed: equal seeds give equal requests.

Every one is bounded (1 MB), and none uses an API that changes the server. What is known to bring Triton 2.51 down
(docs/reliability.md) is left out of the stream; tests of its own hold those.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tritonclient.grpc import service_pb2

#: Deepest JSON in the stream; a deeper one than the server's stack holds is a test of its own.
DEEPEST = 10_000
#: Most chunks of one chunked body in the stream.
MOST_CHUNKS = 2_000
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Malformed:
    """One request.

    Attributes:
        kind: what is wrong with it.
        way: `http` and `http2` are bytes for the HTTP and the gRPC port, `grpc` is the message of a ModelInfer call.
        data: the bytes.
        unfinished: the server rightly waits for more, until the client closes its side.
    """

    kind: str
    way: Literal["http", "http2", "grpc"]
    data: bytes
    unfinished: bool = False


def malformed(count: int, seed: int, model: str = "encode") -> Iterator[Malformed]:
    """Make `count` requests, every kind about equally often."""
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        yield _KINDS[number % len(_KINDS)](chance, model)


# JSON bodies


def _body(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["a good text"]}
    return {"inputs": [tensor | changes]}


def _post(body: bytes, model: str, *headers: str, length: int | None = None) -> bytes:
    head = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: fuzz", "Connection: close", *headers]
    head.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _noise(chance: random.Random, most: int) -> bytes:
    return chance.randbytes(chance.randint(1, most))


def _random_body(chance: random.Random, model: str) -> Malformed:
    return Malformed("random body", "http", _post(_noise(chance, 4096), model))


def _truncated_json(chance: random.Random, model: str) -> Malformed:
    whole = json.dumps(_body()).encode()
    return Malformed("truncated JSON", "http", _post(whole[: chance.randint(0, len(whole) - 1)], model))


def _flipped_json(chance: random.Random, model: str) -> Malformed:
    whole = bytearray(json.dumps(_body() | {"parameters": {"priority": 1, "truncate": "end"}}).encode())
    for _ in range(chance.randint(1, 6)):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    return Malformed("JSON with wrong bytes", "http", _post(bytes(whole), model))


def _nested_json(chance: random.Random, model: str) -> Malformed:
    depth = chance.choice([10, 100, 1000, DEEPEST])
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    middle = opening * depth + "1" + closing * (depth if chance.random() < 0.7 else 0)
    whole = json.dumps(_body()).replace('["a good text"]', middle)
    return Malformed("nested JSON", "http", _post(whole.encode(), model))


_NUMBERS = (0, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 1e308, 10**400, 0.5, 33, 4096)
_TYPES = (
    "BYTES",
    "BOOL",
    "INT8",
    "INT32",
    "INT64",
    "UINT64",
    "FP16",
    "FP32",
    "BF16",
    "STRING",
    "",
    "bytes",
    "X" * 5000,
)
_VALUES: tuple[Any, ...] = (None, True, 1, -1.5, "", "x", [], {}, [[]], [None], [1], [[["a"]]], ["a", 1], {"a": [1]})


def _wrong_tensor(chance: random.Random, model: str) -> Malformed:
    changes: dict[str, Any] = {}
    for name in chance.sample(["datatype", "shape", "data", "name"], chance.randint(1, 3)):
        match name:
            case "datatype":
                changes[name] = chance.choice([*_TYPES, *_VALUES])
            case "shape":
                sizes: list[Any] = [chance.choice(_NUMBERS) for _ in range(chance.randint(0, 5))]
                changes[name] = chance.choice([sizes, *_VALUES])
            case "data":
                changes[name] = chance.choice(_VALUES)
            case _:
                changes[name] = chance.choice(["text", "TOKENS", "", "TEXT\0", "é" * 2000, *_VALUES])
    return Malformed("wrong tensor", "http", _post(json.dumps(_body(**changes)).encode(), model))


def _giant_numbers(chance: random.Random, model: str) -> Malformed:
    digits = chance.choice(["9" * 400, "-" + "9" * 10_000, "1e99999", "-1e-99999", "1" + "0" * 20, "0x10", "NaN", "-0"])
    place = chance.choice(['"shape": [1, %s]', '"shape": [%s, 1]', '"data": [%s]', '"parameters": {"a": %s}'])
    before = '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a"], '
    return Malformed("giant number", "http", _post((before + place % digits + "}]}").encode(), model))


def _wrong_parameters(chance: random.Random, model: str) -> Malformed:
    names = [
        "priority",
        "timeout",
        "truncate",
        "class",
        "sequence_id",
        "sequence_start",
        "binary_data_output",
        "dimensions",
    ]
    values = [*_NUMBERS, *_VALUES, "x" * 10_000, "\ud800"]
    body = _body() | {"parameters": {name: chance.choice(values) for name in chance.sample(names, 3)}}
    if chance.random() < 0.3:
        wrong = {
            chance.choice(["shared_memory_region", "shared_memory_byte_size", "classification"]): chance.choice(values)
        }
        body |= {"outputs": [{"name": chance.choice(["EMBEDDING", "NOTHING"]), "parameters": wrong}]}
    return Malformed("wrong parameters", "http", _post(json.dumps(body).encode(), model))


def _shared_memory(chance: random.Random, model: str) -> Malformed:
    wrong = {
        "shared_memory_region": chance.choice(["none", "", "../x", 1, "x" * 5000]),
        "shared_memory_byte_size": chance.choice(_NUMBERS),
        "shared_memory_offset": chance.choice(_NUMBERS),
    }
    body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": wrong}]}
    return Malformed("shared memory that is not there", "http", _post(json.dumps(body).encode(), model))


def _wrong_unicode(chance: random.Random, model: str) -> Malformed:
    bad = chance.choice(
        [b"\\ud800", b"\\udc00\\ud800", b"\xff\xfe", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xed\xa0\x80", b"\\u12"]
    )
    whole = json.dumps(_body()).encode().replace(b"a good text", b"a" * chance.randint(0, 9) + bad)
    return Malformed("wrong Unicode", "http", _post(whole, model))


# Binary bodies and HTTP itself


def _binary_sizes(chance: random.Random, model: str) -> Malformed:
    text = b"a good text"
    raw = struct.pack("<I", chance.choice([len(text), 0, 2**31, 2**32 - 1, 5, 4096])) + text
    said = chance.choice([len(raw), 0, 1, len(raw) + 1, 2**31, 2**63, 2**64 - 1, -1, "x", None])
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": said}}
    head = json.dumps({"inputs": [tensor]}).encode()
    length = chance.choice([len(head), 0, -1, len(head) - 3, len(head) + 5, 2**31, 2**63, "x", ""])
    return Malformed(
        "wrong binary sizes", "http", _post(head + raw, model, f"Inference-Header-Content-Length: {length}")
    )


def _content_length(chance: random.Random, model: str) -> Malformed:
    whole = json.dumps(_body()).encode()
    said = chance.choice([len(whole) + 1, len(whole) + 10**6, 2**31, 2**63 - 1, 2**64, 10**30, -1])
    return Malformed("wrong Content-Length", "http", _post(whole, model, length=said), unfinished=True)


def _short_length(chance: random.Random, model: str) -> Malformed:
    whole = json.dumps(_body()).encode()
    return Malformed("short Content-Length", "http", _post(whole, model, length=chance.randint(0, len(whole) - 1)))


def _headers(chance: random.Random, model: str) -> Malformed:
    garbage = [
        "X: " + "y" * chance.choice([10, 5000, 70_000]),
        "no colon here",
        ": no name",
        "\xff\xfe: \x01",
        "Content-Encoding: " + chance.choice(["gzip", "deflate", "br", "x"]),
        "Accept-Encoding: " + "gzip, " * 1000,
        "Transfer-Encoding: " + chance.choice(["chunked", "identity", "x"]),
        "Expect: 100-continue",
        "Upgrade: h2c",
        *[f"H{number}: 1" for number in range(chance.choice([1, 100, 2000]))],
    ]
    chosen = chance.sample(garbage, min(len(garbage), chance.randint(1, 40)))
    whole = _post(json.dumps(_body()).encode(), model, *chosen)
    return Malformed("garbage in headers", "http", whole, unfinished=True)


def _chunked(chance: random.Random, model: str) -> Malformed:
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    body = json.dumps(_body()).encode()
    body += b" " * chance.choice([0, 10, MOST_CHUNKS - len(body)])
    parts = [b"%x\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body))]
    if chance.random() < 0.5:
        parts[chance.randrange(len(parts))] = chance.choice(
            [b"zz\r\nx\r\n", b"ffffffffffffffff\r\nx\r\n", b"-1\r\n\r\n", b"\r\n"]
        )
    return Malformed("chunks", "http", head.encode() + b"".join(parts) + b"0\r\n\r\n", unfinished=True)


def _request_line(chance: random.Random, model: str) -> Malformed:
    method = chance.choice(["GET", "PUT", "DELETE", "POST", "HEAD", "OPTIONS", "PRI", "get", "", "X" * 3000])
    path = chance.choice(
        [
            f"/v2/models/{model}/infer", f"/v2/models/{model}/versions/{10**30}/infer", "/v2/models//infer",
            "/" + "a/" * 4000,
            f"/v2/models/{model}/versions/-1/infer", "/v2/models/%00/infer", "/v2/models/%ff%zz/config",
            "/../../etc/passwd",
            f"/v2/models/{model}/generate", f"/v2/models/{model}/generate_stream", "v2", "", "*",
        ]
    )  # fmt: skip
    version = chance.choice(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/", "", "\xff"])
    body = json.dumps(_body()).encode()
    head = f"{method} {path} {version}\r\nHost: fuzz\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return Malformed("wrong request line", "http", head.encode("latin-1") + body, unfinished=True)


def _compressed(chance: random.Random, model: str) -> Malformed:
    body = chance.choice(
        [_noise(chance, 2048), b"\x1f\x8b\x08\x00" + _noise(chance, 512), b"\x78\x9c" + _noise(chance, 512)]
    )
    coding = chance.choice(["gzip", "deflate"])
    return Malformed("wrong compression", "http", _post(body, model, f"Content-Encoding: {coding}"))


def _raw_http(chance: random.Random, model: str) -> Malformed:
    return Malformed("noise on the HTTP port", "http", _noise(chance, 2048), unfinished=True)


# gRPC


def _message(model: str) -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="TEXT", datatype="BYTES", shape=[1, 1])
    raw = struct.pack("<I", 11) + b"a good text"
    return service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])


def _mutated_message(chance: random.Random, model: str) -> Malformed:
    whole = bytearray(_message(model).SerializeToString())
    for _ in range(chance.randint(1, 5)):
        place = chance.randrange(len(whole))
        match chance.randrange(4):
            case 0:
                whole[place] = chance.randrange(256)
            case 1:
                del whole[place : place + chance.randint(1, 8)]
            case 2:
                whole[place:place] = _noise(chance, 16)
            case _:
                whole += whole[place:]
        if not whole:
            whole += b"\x0a"
    return Malformed("mutated message", "grpc", bytes(whole))


def _random_message(chance: random.Random, model: str) -> Malformed:
    return Malformed("random message", "grpc", _noise(chance, 4096))


def _wrong_message(chance: random.Random, model: str) -> Malformed:
    request = _message(model)
    tensor = request.inputs[0]
    for _ in range(chance.randint(1, 3)):
        match chance.randrange(9):
            case 0:
                sizes = [int(size) for size in _NUMBERS if -(2**63) <= size < 2**63 and size == int(size)]
                tensor.shape[:] = [chance.choice(sizes) for _ in range(chance.randint(0, 5))]
            case 1:
                tensor.datatype = chance.choice(_TYPES)
            case 2:
                tensor.name = chance.choice(["", "text", "TOKENS", "x" * 5000])
            case 3:
                del request.raw_input_contents[:]
                request.raw_input_contents.extend(_noise(chance, 64) for _ in range(chance.randint(0, 3)))
            case 4:
                length = chance.choice([0, 5, 12, 2**31, 2**32 - 1])
                request.raw_input_contents[:] = [struct.pack("<I", length) + b"a good text"]
            case 5:
                tensor.contents.bytes_contents.append(b"both")
                tensor.contents.fp32_contents.append(1.0)
            case 6:
                name = chance.choice(
                    ["priority", "timeout", "truncate", "class", "sequence_id", "triton_enable_empty_final_response"]
                )
                value = request.parameters[name]
                match chance.randrange(4):
                    case 0:
                        value.int64_param = chance.choice([0, -1, 2**63 - 1, -(2**63), 2**32])
                    case 1:
                        value.string_param = chance.choice(["", "x", "x" * 10_000, "\0"])
                    case 2:
                        value.bool_param = True
                    case _:
                        value.double_param = chance.choice([float("nan"), float("inf"), -1.0])
            case 7:
                where = tensor.parameters
                where["shared_memory_region"].string_param = chance.choice(["none", "", "../x"])
                where["shared_memory_byte_size"].int64_param = chance.choice([0, -1, 2**63 - 1, 16])
            case _:
                request.model_version = chance.choice(["-1", "0", "99999999999999999999", "x", "1.5"])
    return Malformed("wrong message", "grpc", request.SerializeToString())


def _frames(chance: random.Random, model: str) -> Malformed:
    """HTTP/2 frames of any type, flags, stream and length, behind the right preface or none."""
    data = _PREFACE if chance.random() < 0.8 else b""
    for _ in range(chance.randint(1, 12)):
        payload = chance.randbytes(chance.choice([0, 1, 5, 6, 8, 64, 1000]))
        said = len(payload) if chance.random() < 0.7 else chance.choice([0, 1, 2**14 + 1, 2**24 - 1])
        head = struct.pack(">I", said)[1:] + bytes([chance.randrange(12), chance.randrange(256)])
        data += head + struct.pack(">I", chance.choice([0, 1, 2, 3, 2**31 - 1])) + payload
    return Malformed("HTTP/2 frames", "http2", data, unfinished=True)


def _raw_grpc(chance: random.Random, model: str) -> Malformed:
    data = chance.choice([_noise(chance, 2048), _PREFACE + _noise(chance, 512), b"\x16\x03\x01" + _noise(chance, 512)])
    return Malformed("noise on the gRPC port", "http2", data, unfinished=True)


_KINDS: tuple[Callable[[random.Random, str], Malformed], ...] = (
    _random_body, _truncated_json, _flipped_json, _nested_json, _wrong_tensor, _giant_numbers, _wrong_parameters,
    _shared_memory, _wrong_unicode, _binary_sizes, _content_length, _short_length, _headers, _chunked, _request_line,
    _compressed, _raw_http, _mutated_message, _random_message, _wrong_message, _wrong_message, _mutated_message,
    _frames, _raw_grpc,
)  # fmt: skip


def shown(request: Malformed) -> str:
    """A request for a report, so that it can be sent again."""
    return f"{request.kind} ({request.way}): {base64.b64encode(request.data[:4096]).decode()}"
