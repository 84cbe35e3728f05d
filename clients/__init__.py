"""Clients of the encoder service: gRPC and HTTP, synchronous and asyncio, one interface.

* `client`        EncoderClient: encode, classify, rerank, tag, answer, similarity; ready, facts, status
* `async_client`  AsyncEncoderClient, the same under asyncio
* `core`          what both share: checks, requests, results; `exchange` is the state of one call
* `transports`    gRPC and HTTP, which move requests and know nothing else; `wire` is what they move
* `options`       what a call may ask; `connection` address, TLS, keys; `retry` what is sent again
* `result`        what a call gives; `reading` makes it
* `errors`        what a call can fail with; `failures` is the table from statuses to them
* `cli`           `python -m clients`; `commands`, and what they show with, `progress` and `screen`

Example:
    >>> from clients import EncoderClient
    >>> with EncoderClient("127.0.0.1:8001") as client:
    ...     embeddings = client.encode(["one text", "another"]).embeddings  # float32 [2, dim]
"""

from clients.async_client import AsyncEncoderClient
from clients.client import EncoderClient
from clients.connection import Tls
from clients.core import ClientOptions
from clients.errors import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerFailure,
    ServerUnavailable,
)
from clients.model import ModelFacts
from clients.options import CallOptions
from clients.result import (
    Answer,
    AnswerResult,
    ClassifyResult,
    EncodeResult,
    Entity,
    LabelScore,
    RankedDocument,
    RerankResult,
    TagResult,
    TextEncoding,
)
from clients.retry import Retry, RetryPolicy
from clients.status import ModelStatus, ServerStatus

__all__ = [
    "Answer",
    "AnswerResult",
    "AsyncEncoderClient",
    "CallOptions",
    "ClassifyResult",
    "ClientOptions",
    "DeadlineExceeded",
    "EncodeResult",
    "EncoderClient",
    "EncoderError",
    "Entity",
    "InvalidInput",
    "LabelScore",
    "ModelFacts",
    "ModelStatus",
    "Overloaded",
    "QueueTimeout",
    "RankedDocument",
    "RerankResult",
    "Retry",
    "RetryPolicy",
    "ServerFailure",
    "ServerStatus",
    "ServerUnavailable",
    "TagResult",
    "TextEncoding",
    "Tls",
]
