"""The few messages of KServe v2 over gRPC that the load and the "before" server need, on any protobuf.

Made at run time from their field numbers (grpc_service.proto of triton-inference-server/common), since the GPU
machine's two Pythons have protobuf releases that do not share generated code.
"""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
_STRING, _BYTES, _INT64, _MESSAGE = 9, 12, 3, 11
_FIELDS = {
    "InferInputTensor": [("name", 1, _STRING, ""), ("datatype", 2, _STRING, ""), ("shape", 3, _INT64, "*")],
    "InferOutputTensor": [("name", 1, _STRING, ""), ("datatype", 2, _STRING, ""), ("shape", 3, _INT64, "*")],
    "ModelInferRequest": [
        ("model_name", 1, _STRING, ""), ("id", 3, _STRING, ""), ("inputs", 5, _MESSAGE, "*InferInputTensor"),
        ("raw_input_contents", 7, _BYTES, "*"),
    ],
    "ModelInferResponse": [
        ("model_name", 1, _STRING, ""), ("id", 3, _STRING, ""), ("outputs", 5, _MESSAGE, "*InferOutputTensor"),
        ("raw_output_contents", 6, _BYTES, "*"),
    ],
}  # fmt: skip


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="lanes_kserve.proto", package="inference", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, more in fields:
            made = message.field.add(name=field, number=number, type=kind, label=3 if more[:1] == "*" else 1)
            if kind == _MESSAGE:
                made.type_name = f".inference.{more[1:]}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _FIELDS}


MESSAGES = _messages()


def request_bytes(texts: list[str], number: int = 0, model: str = "encode") -> bytes:
    """A ModelInferRequest with TEXT [n, 1]."""
    request = MESSAGES["ModelInferRequest"](model_name=model, id=str(number))
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[len(texts), 1])
    raw = [text.encode() for text in texts]
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in raw))
    return bytes(request.SerializeToString())


def texts_of(content: bytes) -> list[str]:
    """The texts of a ModelInferRequest."""
    request = MESSAGES["ModelInferRequest"].FromString(content)
    raw, found, at = request.raw_input_contents[0], [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def response_bytes(vectors: Any) -> bytes:
    """A ModelInferResponse with EMBEDDING FP32 [n, dim]."""
    response = MESSAGES["ModelInferResponse"](model_name="encode")
    response.outputs.add(name="EMBEDDING", datatype="FP32", shape=list(vectors.shape))
    response.raw_output_contents.append(vectors.tobytes())
    return bytes(response.SerializeToString())


def output_of(content: bytes, name: str = "EMBEDDING") -> Any:
    """An FP32 output of a ModelInferResponse, [n, dim]."""
    import numpy as np

    response = MESSAGES["ModelInferResponse"].FromString(content)
    place = [tensor.name for tensor in response.outputs].index(name)
    return np.frombuffer(response.raw_output_contents[place], np.float32).reshape(*response.outputs[place].shape)
