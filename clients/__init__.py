"""Clients of the encoder service.

* `grpc_client`  EncoderClient: texts in, embeddings out, any number of texts
* `options`      what a call may ask, and its checks
* `result`       what a call gives
* `errors`       what a call can fail with
* `cli`          `python -m clients encode "a text"`

Example:
    >>> from clients import EncoderClient
    >>> with EncoderClient("127.0.0.1:8001") as client:
    ...     embeddings = client.encode(["one text", "another"]).embeddings  # float32 [2, dim]
"""

from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerFailure,
    ServerUnavailable,
)
from clients.grpc_client import EncoderClient
from clients.result import EncodeResult, TextEncoding

__all__ = [
    "DeadlineExceeded",
    "EncodeResult",
    "EncoderClient",
    "EncoderError",
    "InvalidInput",
    "Overloaded",
    "QueueTimeout",
    "ServerFailure",
    "ServerUnavailable",
    "TextEncoding",
]
