"""The table of error kinds, with the texts that tritonserver 2.51 sends."""

import pickle

import pytest

from clients import (
    DeadlineExceeded,
    EncoderError,
    InvalidInput,
    Overloaded,
    QueueTimeout,
    ServerFailure,
    ServerUnavailable,
)
from clients.failures import HTTP_STATUSES, from_http_code, from_status

UNREACHABLE = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:28599: "
    "Failed to connect to remote host: Connection refused"
)
UNKNOWN_NAME = (
    "DNS resolution failed for no.such.host:8001: C-ares status is not ARES_SUCCESS qtype=A name=no.such.host "
    "is_balancer=0: Domain name not found"
)
AS_SENT_BY_TRITON = [
    ("INVALID_ARGUMENT", "text 3 has 200000 bytes; limit: 131072; to do: split it", InvalidInput),
    (
        "INVALID_ARGUMENT",
        "[request id: <id_unknown>] inference request batch-size must be <= 32 for 'encode'",
        InvalidInput,
    ),
    ("INVALID_ARGUMENT", "unexpected inference input 'TEXTS' for model 'encode'", InvalidInput),
    (
        "INVALID_ARGUMENT",
        "expected 1 inputs but got 2 inputs for model 'encode'. Got input(s) ['TEXT_PAIR','TEXT']",
        InvalidInput,
    ),
    ("UNAVAILABLE", "Request timeout expired", QueueTimeout),
    ("UNAVAILABLE", "[request id: r7] Request timeout expired", QueueTimeout),
    ("UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size", Overloaded),
    ("UNAVAILABLE", "the long lane is full: 64 texts", Overloaded),
    ("UNAVAILABLE", "Long lane: bound reached", Overloaded),
    ("UNAVAILABLE", UNREACHABLE, ServerUnavailable),
    ("UNAVAILABLE", UNKNOWN_NAME, ServerUnavailable),
    ("UNAVAILABLE", f"{UNREACHABLE} Ssl handshake failed", ServerUnavailable),
    ("UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-key'", InvalidInput),
    ("UNAUTHENTICATED", "no token", InvalidInput),
    ("PERMISSION_DENIED", "This API is restricted, expecting header 'key'", InvalidInput),
    ("UNAVAILABLE", "Request for unknown model: 'encode' version 1 is not at ready state", ServerUnavailable),
    ("UNAVAILABLE", "anything else", ServerUnavailable),
    ("NOT_FOUND", "Request for unknown model: 'encode' is not found", ServerUnavailable),
    ("NOT_FOUND", "Request for unknown model: 'encode' has no available versions", ServerUnavailable),
    ("CANCELLED", "Locally cancelled by application!", ServerUnavailable),
    ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded),
    ("RESOURCE_EXHAUSTED", "Received message larger than max (9 vs. 4)", InvalidInput),
    ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (9 vs. 4)", InvalidInput),
    ("RESOURCE_EXHAUSTED", "received metadata size exceeds hard limit (value length 20000 vs. 16384)", InvalidInput),
    ("RESOURCE_EXHAUSTED", "received trailing metadata size exceeds limit", InvalidInput),
    ("RESOURCE_EXHAUSTED", "no memory", Overloaded),
    ("RESOURCE_EXHAUSTED", "Too many pings", Overloaded),
    ("UNIMPLEMENTED", "Method not found!", ServerFailure),
    ("INTERNAL", "Stub process 'encode_0_0' is not healthy.", ServerFailure),
    ("UNKNOWN", "", ServerFailure),
    ("DATA_LOSS", "a status no row names", ServerFailure),
]


@pytest.mark.parametrize(("status", "message", "kind"), AS_SENT_BY_TRITON)
def test_from_status_gives_the_kind_the_status_and_the_url(status: str, message: str, kind: type[EncoderError]) -> None:
    error = from_status(status, message, "host:8001")
    assert type(error) is kind
    assert error.status == status
    assert error.url == "host:8001"
    assert "host:8001" in str(error)
    assert message.split("] ")[-1] in str(error)
    assert "request id" not in str(error)
    assert "\n" not in str(error)


def test_message_names_the_texts_counted_from_zero() -> None:
    sent = ("UNAVAILABLE", "Request timeout expired")
    assert str(from_status(*sent, "h:1", range(32, 64))).startswith("texts 32 to 63: the request waited")
    assert str(from_status(*sent, "h:1", range(5, 6))).startswith("text 5: ")
    assert from_status(*sent, "h:1", range(32, 64)).texts == range(32, 64)
    assert from_status(*sent, "h:1").texts is None


def invalid(message: str) -> tuple[str, str]:
    return "INVALID_ARGUMENT", message


@pytest.mark.parametrize("request_id", ["", "[request id: <id_unknown>] "])
@pytest.mark.parametrize(
    ("message", "texts", "shown", "position"),
    [
        ("text 3 has 602 tokens; limit: 512", range(32, 46), "text 35 has 602 tokens; limit: 512", 35),
        ("text 0 has 602 tokens; limit: 512", range(32, 64), "text 32 has 602 tokens; limit: 512", 32),
        ("text 31 has 602 tokens; limit: 512", range(0, 32), "text 31 has 602 tokens; limit: 512", 31),
        ("text 0 has 602 tokens; limit: 512", range(0, 1), "text 0 has 602 tokens; limit: 512", 0),
        ("text 0 is not UTF-8: text 0 of 1", range(64, 65), "text 64 is not UTF-8: text 0 of 1", 64),
    ],
)
def test_text_the_server_refuses_is_named_once_by_its_position_in_the_call(
    request_id: str, message: str, texts: range, shown: str, position: int
) -> None:
    error = from_status(*invalid(request_id + message), "h:1", texts)
    assert str(error) == f"{shown}; server: h:1"
    assert error.texts == range(position, position + 1)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.texts) == (str(error), error.texts)


@pytest.mark.parametrize(
    "message",
    [
        "the texts have 9 bytes together; limit: 4",
        "text 14 has 602 tokens",  # the request had 14 texts
        "text 99999999999999999999 has 602 tokens",
        "text -1 has 602 tokens",
        "text ٣ has 602 tokens",
        "texts 3 is wrong",
        "TEXT 3 is wrong",
        "in text 3 is a fault",
    ],
)
def test_message_that_names_no_text_of_the_request_is_about_all_of_them(message: str) -> None:
    error = from_status(*invalid(message), "h:1", range(32, 46))
    assert str(error) == f"texts 32 to 45: {message}; server: h:1"
    assert error.texts == range(32, 46)


def test_position_is_left_as_it_is_where_no_texts_were_sent_and_in_other_kinds() -> None:
    assert str(from_status(*invalid("text 3 is too long"), "h:1")) == "text 3 is too long; server: h:1"
    error = from_status("INTERNAL", "text 3 failed", "h:1", range(32, 46))
    assert str(error).startswith("texts 32 to 45: the server failed: 'text 3 failed'")
    assert error.texts == range(32, 46)


@pytest.mark.parametrize(
    "message", ["received metadata size exceeds hard limit", "Received message larger than max (9 vs. 4)"]
)
def test_message_over_a_limit_of_grpc_is_not_to_be_tried_again(message: str) -> None:
    error = from_status("RESOURCE_EXHAUSTED", message, "h:1", range(2))
    assert not error.safe_to_retry
    assert str(error) == (
        f"texts 0 to 1: a message of the call is too large: '{message}'; server: h:1; "
        "to do: give EncoderClient a smaller batch=, or shorten the texts"
    )


def test_inputs_of_another_task_have_a_remedy() -> None:
    error = from_status(*invalid("expected 1 inputs but got 2 inputs for model 'encode'"), "h:1", range(2))
    assert str(error).startswith("texts 0 to 1: the model takes other inputs than the call sends: ")
    assert "to do: name an entry model whose task is the call's" in str(error)


def test_remedy_of_the_server_stands_alone() -> None:
    sent = "the long lane holds 64 texts; limit: 64; to do: send again later"
    error = from_status("UNAVAILABLE", sent, "h:1")
    assert str(error) == f"{sent}; server: h:1"


def test_safe_to_retry_only_when_the_server_computed_nothing() -> None:
    retried = {kind for kind in EncoderError.__subclasses__() if kind.safe_to_retry}
    assert retried == {QueueTimeout, Overloaded, ServerUnavailable}


def test_every_kind_is_in_the_table() -> None:
    assert {kind for _, _, kind in AS_SENT_BY_TRITON} == set(EncoderError.__subclasses__())


def test_message_has_what_value_limit_remedy_in_this_order() -> None:
    error = InvalidInput("batch is out of its limits", value=0, limit="1 to 1024", remedy="give 32")
    assert str(error) == "batch is out of its limits: 0; limit: 1 to 1024; to do: give 32"
    assert error.status == "INVALID_ARGUMENT"


def test_message_shortens_a_long_value() -> None:
    assert len(str(InvalidInput("too long", value="x" * 100_000))) < 500


def test_error_survives_pickling_with_its_fields() -> None:
    error = Overloaded("full", value=64, remedy="wait", url="h:1", texts=range(2, 4))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), copy.url, copy.texts, copy.value) == (Overloaded, str(error), "h:1", range(2, 4), 64)


@pytest.mark.parametrize(("status", "message", "kind"), AS_SENT_BY_TRITON)
def test_only_what_was_surely_not_computed_may_be_sent_again(
    status: str, message: str, kind: type[EncoderError]
) -> None:
    error = from_status(status, message, "h:1")
    if error.refused:
        assert kind in (QueueTimeout, Overloaded, ServerUnavailable)
    assert error.refused is (kind in (QueueTimeout, Overloaded) or message in (UNREACHABLE, UNKNOWN_NAME))


@pytest.mark.parametrize("code", [*HTTP_STATUSES, 500, 418])
def test_http_code_is_given_as_the_status_it_stands_for(code: int) -> None:
    failure = from_http_code(code, "")
    assert failure.status == HTTP_STATUSES.get(code, "INTERNAL")
    assert str(code) in failure.message or code == 413
